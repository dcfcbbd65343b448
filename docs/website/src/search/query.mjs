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
/** Of a phrase that has a synonym, the words that were typed count this much. */
const TYPED = 0.4;

/** @param {string} text */
export const normalize = (text) => text.normalize('NFKC').toLowerCase().replace(/\s+/g, ' ').trim();

/**
 * @typedef {{say: string[], means: string, page?: string}} Synonym
 * @typedef {{count: (text: string) => number, source: string, weight: number, isNeeded: boolean}} Term `source`: of the
 * expression that finds it; `isNeeded`: a result without it answers less of the question.
 */

/**
 * @param {string} query
 * @param {Synonym[]} synonyms
 * @returns {{terms: Term[], pages: Map<string, number>}} What to look for, and pages that the synonyms name, with 1 for
 * those that the whole query asks for and less for others.
 */
export function readQuery(query, synonyms) {
  let rest = normalize(query);
  const pages = new Map();
  const terms = [];
  for (const {phrase, synonym} of phrasesIn(rest, synonyms)) {
    const share = phrase.length / normalize(query).length;
    if (synonym.page) {
      pages.set(synonym.page, Math.max(share, pages.get(synonym.page) ?? 0));
    }
    terms.push(...termsOf(synonym.means, 1, true), ...termsOf(phrase, TYPED, false));
    rest = rest.replace(phrase, ' ');
  }
  return {terms: [...terms, ...termsOf(rest, 1, true)], pages};
}

/**
 * What finds the words of a query, as it was typed, in a text.
 *
 * @param {string} query
 * @param {Synonym[]} synonyms Whose words are found as well.
 * @returns {RegExp | null} None for a query without words.
 */
export function markerOf(query, synonyms = []) {
  const sources = [...termsOf(normalize(query), 1, true), ...readQuery(query, synonyms).terms].map(
    ({source}) => source,
  );
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
 * @param {boolean} isNeeded
 * @returns {Term[]}
 */
function termsOf(text, weight, isNeeded) {
  const runs = text.match(/[\p{Script=Han}]+|[\p{L}\p{N}_]+/gu) ?? [];
  const latin = runs.filter((run) => !HAN.test(run)).flatMap((run) => run.split('_').filter(Boolean));
  const words = latin.filter((word) => !STOP.has(word));
  const kept = words.length > 0 || runs.length > latin.length ? words : latin;
  const pairs = kept.slice(1).map((word, index) => [kept[index], word]);
  const scale = (term, factor, needed = isNeeded) => ({...term, weight: weight * factor, isNeeded: needed});
  return [
    ...kept.map((word) => scale(latinTerm(word), 1)),
    ...pairs.map((pair) => scale(pairTerm(pair), 1, false)),
    ...runs.filter((run) => HAN.test(run)).flatMap((run) => hanTerms(run).map((term) => scale(term, term.factor))),
  ];
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
  const source = `(?<![a-z0-9])${escape(first)}[^a-z0-9]{0,2}${escape(second)}`;
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
      return [{text: part, factor: 1}, ...pairs.map((text) => ({text, factor: 1 / pairs.length}))];
    })
    .map(({text, factor}) => ({count: (where) => where.split(text).length - 1, source: text, factor}));
}

/** @param {string} text */
const escape = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
