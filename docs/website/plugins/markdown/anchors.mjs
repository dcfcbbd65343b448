/** Anchors that both languages share, so that the language switch keeps the reader's place. */

import {visit} from 'unist-util-visit';

/**
 * Gives headings the ids that the front matter names, and leads links to them.
 *
 * @param {{children: object[]}} tree
 * @param {import('./source.mjs').Source} source
 */
export function shareAnchors(tree, source) {
  const {headings = {}, links = {}} = source.page;
  visit(tree, ['heading', 'link', 'definition'], (node) => {
    const id = headings[node.position?.start.line];
    if (node.type !== 'heading') {
      node.url = links[decoded(node.url)] ?? node.url;
    } else if (id) {
      node.data = {...node.data, hProperties: {...node.data?.hProperties, id}};
    }
  });
}

/** @param {string} url Percent signs may stand for themselves. */
function decoded(url) {
  try {
    return decodeURI(url);
  } catch {
    return url;
  }
}
