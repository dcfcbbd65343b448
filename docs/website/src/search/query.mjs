/** What is looked for: the words of a query, those of its synonyms, and how often a text says them. */

/** Words that say nothing of what is looked for, in questions of both languages. */
const STOP = new Set(
  'a an and are as at be by can do does for from how i if in is it my of on or so that the this to use using what when where which why with you'.split(
    ' ',
  ),
);
const STOP_HAN = /(?:如何|怎么样?|怎样|什么是|是什么|什么|哪个|哪些|为什么|请问|可以|的|了|吗|呢|与|和|在|用)/g;
const HAN = /\p{Script=Han}/u;
const ENDINGS = 's|es|d|ed|ing|e|er|ers|or|ors|ion|ions|ation|ations|ism|ize|ized|izing|y|ies|al|ly|able';
const ENDING = new RegExp(`^(?:${ENDINGS})?$`);
const STEM = /^(\w{3,}?)(?:s|es|ed|ing|e|ion|ions|y|ies)$/;
/** How much an occurrence counts: the word itself, another form of it, and a word that only begins with it. */
const FORM = 0.85;
const BEGINNING = 0.3;
/** Of a phrase that has a synonym, the words that are meant count this much beside those that were typed. */
const MEANT = 0.7;

/** @param {string} text */
export const normalize = (text) => text.normalize('NFKC').toLowerCase().replace(/\s+/g, ' ').trim();

/**
 * @typedef {{say: string[], means: string, page?: string}} Synonym
 * @typedef {{count: (text: string) => number, source: string, weight: number}} Term `source`: of the expression that
 * finds it.
 * @typedef {{ways: Term[][], weight: number}} Need A part of the question, and the ways to say it.
 */

/**
 * @param {string} query
 * @param {Synonym[]} synonyms
 * @returns {{needs: Need[], pages: Map<string, number>}} What to look for, and pages that the synonyms name, with 1 for
 * those that the whole query asks for and less for others.
 */
export function readQuery(query, synonyms) {
  let rest = normalize(query);
  const length = rest.length;
  const pages = new Map();
  const needs = [];
  for (const {phrase, synonym} of phrasesIn(rest, synonyms)) {
    if (synonym.page) {
      pages.set(synonym.page, Math.max(phrase.length / length, pages.get(synonym.page) ?? 0));
    }
    needs.push({ways: [termsOf(phrase, 1), termsOf(normalize(synonym.means), MEANT)], weight: phrase.length});
    rest = rest.replace(phrase, ' ');
  }
  needs.push({ways: [termsOf(rest, 1)], weight: rest.replace(/\s/g, '').length});
  return {needs: needs.filter(({ways}) => ways.some((way) => way.length > 0)), pages};
}

/**
 * What finds the words of a query, as it was typed, in a text.
 *
 * @param {string} query
 * @param {Synonym[]} synonyms Whose words are found as well.
 * @returns {RegExp | null} None for a query without words.
 */
export function markerOf(query, synonyms = []) {
  const meant = readQuery(query, synonyms).needs.flatMap(({ways}) => ways.flat());
  const sources = [...termsOf(normalize(query), 1), ...meant].map(({source}) => source);
  const longestFirst = [...new Set(sources)].sort((one, other) => other.length - one.length);
  return longestFirst.length > 0 ? new RegExp(longestFirst.join('|'), 'gi') : null;
}

/** The phrases of a query that have a synonym, the longest first, none within another. */
function phrasesIn(query, synonyms) {
  const found = synonyms
    .flatMap((synonym) => synonym.say.map((phrase) => ({phrase, synonym})))
    .filter(({phrase}) => says(query, phrase))
    .sort((one, other) => other.phrase.length - one.phrase.length);
  let rest = query;
  return found.filter(({phrase}) => {
    const isFree = says(rest, phrase);
    rest = isFree ? rest.replace(phrase, ' ') : rest;
    return isFree;
  });
}

/** @param {string} text @param {string} phrase */
const says = (text, phrase) =>
  HAN.test(phrase) ? text.includes(phrase) : new RegExp(`(?<![a-z0-9])${escape(phrase)}(?![a-z0-9])`).test(text);

/**
 * @param {string} text
 * @param {number} weight
 * @returns {Term[]}
 */
function termsOf(text, weight) {
  const runs = text.match(/\p{Script=Han}+|[\p{L}\p{N}]+/gu) ?? [];
  const latin = runs.filter((run) => !HAN.test(run));
  const telling = latin.filter((word) => !STOP.has(word));
  // A question of stop words only is about them.
  const words = telling.length === 0 && latin.length === runs.length ? latin : telling;
  const pairs = words.slice(1).map((word, index) => [words[index], word]);
  const terms = [
    ...words.map(latinTerm),
    ...pairs.map(pairTerm),
    ...runs.filter((run) => HAN.test(run)).flatMap(hanTerms),
  ];
  return terms.map((term) => ({...term, weight: weight * (term.weight ?? 1)}));
}

/** A word of Latin letters: it begins where a word begins, never within one. */
function latinTerm(word) {
  const stem = word.length > 3 ? (STEM.exec(word)?.[1] ?? word) : word;
  const source = `(?<![a-z0-9])${escape(stem)}[a-z0-9]*`;
  const pattern = new RegExp(source, 'g');
  const value = (rest) => {
    if (stem + rest === word) {
      return 1;
    }
    return ENDING.test(rest) ? FORM : (stem + rest).startsWith(word) ? BEGINNING : 0;
  };
  const count = (text) => {
    let sum = 0;
    // Most texts do not say the word: to see that quickly is what makes the scan fast.
    for (const [found] of text.includes(stem) ? text.matchAll(pattern) : []) {
      sum += value(found.slice(stem.length));
    }
    return sum;
  };
  return {count, source};
}

/** Two words side by side, however they are joined: `fine-tune`, `fine tune`, `finetune`. */
function pairTerm([first, second]) {
  const source = `(?<![a-z0-9])${escape(first)}[^a-z0-9]{0,2}${escape(second)}[a-z0-9]*`;
  const pattern = new RegExp(source, 'g');
  return {count: (text) => (text.includes(first) ? [...text.matchAll(pattern)].length : 0), source};
}

/** Chinese, which has no spaces: all of it, and each two characters side by side. */
function hanTerms(run) {
  return run
    .split(STOP_HAN)
    .filter(Boolean)
    .flatMap((part) => {
      const pairs = part.length > 2 ? [...part].slice(1).map((_, index) => part.slice(index, index + 2)) : [];
      return [{text: part, weight: 1}, ...pairs.map((text) => ({text, weight: 1 / pairs.length}))];
    })
    .map(({text, weight}) => ({count: (where) => where.split(text).length - 1, source: text, weight}));
}

/** @param {string} text */
const escape = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
