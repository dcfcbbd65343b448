/** What a block printed, shown as the lower part of that block: as it was recorded, or as the author wrote it. */

import {component} from './tree.mjs';

/** @param {{type: string, lang?: string, meta?: string}} node */
const isOutput = (node) => node.type === 'code' && node.lang === 'text' && /^output\b/.test(node.meta ?? '');

/**
 * @param {object[]} children
 * @param {import('./source.mjs').Source} source
 */
export function attachOutputs(children, source) {
  return children.map((node) => (isOutput(node) ? output(node, source.recordedOutput(node)) : node));
}

/**
 * @param {object} node
 * @param {string | undefined} recorded What really was printed, where the author left something open.
 */
function output(node, recorded) {
  const kind = recorded === undefined ? undefined : 'recorded';
  return component('Output', {kind}, [{...node, meta: null, value: recorded ?? node.value}]);
}
