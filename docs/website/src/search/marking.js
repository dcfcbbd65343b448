/** On the page that a reader chose from the search, the words that were looked for stand out. */

import {markerOf} from './query.mjs';

const NAME = 'search';
let sought = null;

/** @param {string} query What the page that opens next was found by. */
export function markNext(query) {
  sought = query;
}

/** A client module of Docusaurus: a page is shown. */
export function onRouteDidUpdate({location, previousLocation}) {
  if (!globalThis.CSS?.highlights) {
    return;
  }
  const marker = sought === null ? null : markerOf(sought);
  sought = null;
  if (marker) {
    // The page is drawn after this call.
    requestAnimationFrame(() => CSS.highlights.set(NAME, new Highlight(...rangesOf(marker))));
  } else if (location.pathname !== previousLocation?.pathname) {
    CSS.highlights.delete(NAME);
  }
}

/** @param {RegExp} marker @returns {Range[]} */
function rangesOf(marker) {
  const ranges = [];
  const texts = document.createTreeWalker(document.querySelector('article') ?? document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    for (const {0: words, index} of texts.currentNode.data.matchAll(marker)) {
      const range = new Range();
      range.setStart(texts.currentNode, index);
      range.setEnd(texts.currentNode, index + words.length);
      ranges.push(range);
    }
  }
  return ranges;
}
