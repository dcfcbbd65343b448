/**
 * The search: a scan over the sections of all pages for each query. The text of a documentation is small enough for it,
 * so that no index of words is stored, transferred or built.
 */

import {normalize, readQuery} from './query.mjs';

/** How much a word counts by where it stands, and how much the length of the place counts against it. */
const FIELDS = {heading: {weight: 6, length: 0.6}, title: {weight: 3, length: 0.4}, text: {weight: 1, length: 0.6}};
const CODE = 0.1;
const SATURATION = 2;
/** How much what explains goes before the reference, which answers to names, and before lists of links. */
const WEIGHT = {text: 1, reference: 0.55, links: 0.3};
const LEFT_OUT = 1.5;
/** Above all that words can reach. */
const EXACT_NAME = 1000;
const NAMED_PAGE = 500;
/** Who asks for a page by a synonym is led to its top, unless a section answers far better. */
const TOP = 1.6;
/** How much the next best sections of a page add to its best. */
const REST = [1, 0.25, 0.1];
/** The kind of a section that lists links to other pages. */
const LINKS = 3;
/** @param {number} kind */
export const isObject = (kind) => kind === 1 || kind === 2;
const IDENTIFIER = /[a-z0-9][A-Z]|[._]\w|\w\(/;

/**
 * @typedef {{page: number, anchor: string, heading: string, kind: number, text: string}} Section `kind`: 0
 * for text, 1 for an object of the reference, 2 for a member of one, 3 for links.
 * @typedef {[number, string, string, number, string, string]} Row The values of a section in their order.
 * @typedef {{pages: {title: string, path: string, isReference: boolean}[], sections: Row[],
 *   synonyms: import('./query.mjs').Synonym[]}} Stored
 * @typedef {{page: object, score: number, sections: Section[]}} Result A page with its sections, the best first.
 */

/**
 * Prepare what a query scans.
 *
 * @param {Stored} stored
 */
export function prepare({pages, sections, synonyms}) {
  const prepared = sections.map(([page, anchor, heading, kind, text, code]) => {
    const {title, isReference} = pages[page];
    const sort = isReference ? 'reference' : kind === LINKS ? 'links' : 'text';
    const fields = {heading: isObject(kind) ? `${anchor} ${apart(anchor)}` : heading, title, text};
    const lower = Object.fromEntries(Object.entries(fields).map(([name, words]) => [name, normalize(words)]));
    return {section: {page, anchor, heading, kind, text}, fields: lower, code: normalize(code), sort};
  });
  const average = Object.fromEntries(
    Object.keys(FIELDS).map((name) => [
      name,
      prepared.reduce((sum, {fields}) => sum + fields[name].length, 1) / prepared.length,
    ]),
  );
  return {pages, prepared, average, synonyms};
}

/** The words of a name: `LowLevelZeroPlugin` has four. @param {string} name */
const apart = (name) => name.replace(/([a-z0-9])([A-Z])/g, '$1 $2');

/**
 * @param {ReturnType<typeof prepare>} index
 * @param {string} query
 * @returns {Result[]} The best first.
 */
export function search(index, query) {
  const {needs, pages} = readQuery(query, index.synonyms);
  const scores = scoreAll(index, needs);
  const name = IDENTIFIER.test(query) ? normalize(query).replace(/[\s()]+/g, '') : null;
  const results = new Map();
  index.prepared.forEach(({section}, place) => {
    const score =
      scores[place] + (name && isNamed(section, name) ? EXACT_NAME / (1 + section.anchor.length / 1000) : 0);
    if (score > 0) {
      const result = results.get(section.page) ?? {page: index.pages[section.page], scored: []};
      result.scored.push({section, score});
      results.set(section.page, result);
    }
  });
  return [...results.values()]
    .map(({page, scored}) => total(page, scored, pages.get(page.path) ?? 0))
    .sort((one, other) => other.score - one.score);
}

/** @param {Section} section @param {string} name */
const isNamed = ({kind, anchor}, name) => kind > 0 && `.${anchor.toLowerCase()}`.endsWith(`.${name}`);

/** A page from the scores of its sections; `asked` is how much of the query asks for this page by a synonym. */
function total(page, scored, asked) {
  const isAsked = asked === 1;
  const weighed = scored.map(({section, score}) => ({
    section,
    score: isAsked && !section.anchor ? TOP * score : score,
  }));
  const ordered = weighed.sort((one, other) => other.score - one.score);
  const sum = REST.reduce((so, share, place) => so + share * (ordered[place]?.score ?? 0), 0);
  const score = sum * (1 + asked) + (isAsked ? NAMED_PAGE : 0);
  return {page, score, sections: ordered.map(({section}) => section)};
}

/** @returns {number[]} For each section how well it answers: what it says, less what it leaves out. */
function scoreAll(index, needs) {
  const {prepared} = index;
  const scores = new Array(prepared.length).fill(0);
  const answered = new Array(prepared.length).fill(0);
  const all = needs.reduce((sum, {weight}) => sum + weight, 0);
  for (const {ways, weight} of needs) {
    const found = ways.map((way) => scoreWay(index, way));
    prepared.forEach((_, place) => {
      found.forEach((way) => (scores[place] += way.scores[place]));
      answered[place] += (weight / all) * Math.max(...found.map((way) => way.shares[place]));
    });
  }
  return scores.map((score, place) => score * answered[place] ** LEFT_OUT * WEIGHT[prepared[place].sort]);
}

/** @returns {{scores: number[], shares: number[]}} For each section, what it says of the words and which part of them. */
function scoreWay({prepared, average}, terms) {
  const scores = new Array(prepared.length).fill(0);
  const shares = new Array(prepared.length).fill(0);
  let all = 0;
  for (const term of terms) {
    const counts = prepared.map((entry) => countIn(entry, term, average));
    const holding = counts.filter((count) => count > 0).length;
    // The rarer a word, the more it tells; one that nobody says, nobody leaves out.
    const rarity = Math.log(1 + (prepared.length - holding + 0.5) / (holding + 0.5)) * term.weight;
    all += holding > 0 ? rarity : 0;
    counts.forEach((count, place) => {
      scores[place] += rarity * (count / (count + SATURATION));
      shares[place] += count > 0 ? rarity : 0;
    });
  }
  return {scores, shares: shares.map((share) => (all > 0 ? share / all : 0))};
}

function countIn({fields, code}, term, average) {
  let sum = code ? CODE * term.count(code) : 0;
  for (const [name, {weight, length}] of Object.entries(FIELDS)) {
    const found = term.count(fields[name]);
    if (found > 0) {
      sum += (weight * found) / (1 - length + (length * fields[name].length) / average[name]);
    }
  }
  return sum;
}
