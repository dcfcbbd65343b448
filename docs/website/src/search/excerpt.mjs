/** The part of a text that a result shows. */

const LENGTH = 150;
/** Characters that are shown before the first word that was found. */
const BEFORE = 40;

/**
 * @param {string} text
 * @param {RegExp | null} marker
 * @returns {string} The part around the first word that was found, or the beginning.
 */
export function excerptOf(text, marker) {
  const found = marker ? text.search(marker) : -1;
  if (found < BEFORE * 2) {
    return text.length > LENGTH ? `${cut(text, 0)} …` : text;
  }
  const word = text.lastIndexOf(' ', found - BEFORE);
  const start = word > found - 2 * BEFORE ? word + 1 : found - BEFORE;
  return `… ${cut(text, start)}${start + LENGTH < text.length ? ' …' : ''}`;
}

/** @param {string} text @param {number} start */
function cut(text, start) {
  const part = text.slice(start, start + LENGTH);
  const end = start + LENGTH < text.length ? part.lastIndexOf(' ') : -1;
  return end > LENGTH - 20 ? part.slice(0, end) : part;
}

/**
 * @param {string} text
 * @param {RegExp | null} marker
 * @returns {{words: string, isFound: boolean}[]} The text in parts, of which those that were found stand out.
 */
export function partsOf(text, marker) {
  const parts = [];
  let end = 0;
  for (const {0: words, index} of marker ? text.matchAll(marker) : []) {
    parts.push({words: text.slice(end, index), isFound: false}, {words, isFound: true});
    end = index + words.length;
  }
  return [...parts, {words: text.slice(end), isFound: false}].filter(({words}) => words !== '');
}
