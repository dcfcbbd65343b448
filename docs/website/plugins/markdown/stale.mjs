/** Sections of a translation whose original has changed since: a mark below their headings. */

import {component, wordsOf} from './tree.mjs';

/**
 * @param {{children: object[]}} tree
 * @param {import('./source.mjs').Source} source
 */
export function markStale(tree, source) {
  const stale = new Set(source.page.stale ?? []);
  tree.children = tree.children.flatMap((node) =>
    node.type === 'heading' && stale.has(wordsOf(node)) ? [node, component('StaleSection')] : [node],
  );
}
