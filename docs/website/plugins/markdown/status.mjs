/** What stands below the title: what a reader can do afterwards, what kind of page it is, when it was last verified. */

import {code, component, text} from './tree.mjs';

/**
 * @param {{children: object[]}} tree
 * @param {import('./source.mjs').Source} source
 */
export function addStatus(tree, source) {
  const title = tree.children.findIndex(({type, depth}) => type === 'heading' && depth === 1);
  if (title >= 0) {
    tree.children.splice(title + 1, 0, ...lead(source.page.about?.outcome), component('PageStatus'));
  }
}

/** @param {string | undefined} outcome A sentence, with code between backticks. */
function lead(outcome) {
  const words = outcome?.split('`').map((part, place) => (place % 2 ? code(part) : text(part)));
  return words ? [{type: 'paragraph', data: {hProperties: {className: 'lead'}}, children: words}] : [];
}
