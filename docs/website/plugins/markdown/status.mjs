/** The line below the title that says when the page was last verified. */

import {component} from './tree.mjs';

/**
 * @param {{children: object[]}} tree
 */
export function addStatus(tree) {
  const title = tree.children.findIndex(({type, depth}) => type === 'heading' && depth === 1);
  if (title >= 0) {
    tree.children.splice(title + 1, 0, component('PageStatus'));
  }
}
