/** What a block printed, shown as the lower part of that block. */

import {component} from './tree.mjs';

/** @param {{type: string, lang?: string, meta?: string}} node */
const isOutput = (node) => node.type === 'code' && node.lang === 'text' && /^output\b/.test(node.meta ?? '');

/**
 * @param {object[]} children
 */
export function attachOutputs(children) {
  return children.map((node) => (isOutput(node) ? component('Output', {}, [{...node, meta: null}]) : node));
}
