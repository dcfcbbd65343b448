/** The part of a text that a result shows. */

const LENGTH = 130;
/** Of Chinese, whose characters are wide. */
const LENGTH_HAN = 72;
/** Characters that are shown before the first word that was found. */
const BEFORE = 40;

/**
 * @param {string} text
 * @param {RegExp | null} marker
 * @returns {string} The part around the first word that was found, or the beginning.
 */
export function excerptOf(text, marker) {
  const length = /\p{Script=Han}/u.test(text.slice(0, LENGTH)) ? LENGTH_HAN : LENGTH;
  const found = marker ? text.search(marker) : -1;
  if (found < length - BEFORE) {
    return text.length > length ? `${cut(text, 0, length)} …` : text;
  }
  const word = text.lastIndexOf(' ', found - BEFORE);
  const start = word > found - 2 * BEFORE ? word + 1 : found - BEFORE;
  return `… ${cut(text, start, length)}${start + length < text.length ? ' …' : ''}`;
}

/** @param {string} text @param {number} start @param {number} length */
function cut(text, start, length) {
  const part = text.slice(start, start + length);
  const end = start + length < text.length ? part.lastIndexOf(' ') : -1;
  return end > length - 20 ? part.slice(0, end) : part;
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
