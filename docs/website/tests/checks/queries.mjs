/** What people type into the search, and the page that must come first; the search runs here as on the site. */

import {readFileSync} from 'node:fs';
import {gzipSync} from 'node:zlib';
import {ensure} from '../browser.mjs';
import {prepare, search} from '../../src/search/engine.mjs';

const QUERIES = JSON.parse(readFileSync(new URL('../queries.json', import.meta.url), 'utf8'));
/** Of all queries, so many must lead to the page that is named; no page may come later than third. */
const FIRST = 0.9;
const LAST = 3;
/** Bytes of a language's index, compressed. */
const BUDGET = 1024 * 1024;

export const queries = {
  name: 'the search leads to the page that is meant, with an index of less than 1 MB',
  async run(site) {
    const ranks = [];
    for (const [prefix, asked] of Object.entries(QUERIES)) {
      const response = await fetch(`${site.url}${prefix}search-index/current.json`);
      ensure(response.ok, `there is no index of ${prefix}`);
      const text = await response.text();
      const size = gzipSync(text).length;
      ensure(size < BUDGET, `the index of ${prefix} has ${size} bytes`);
      const index = prepare(JSON.parse(text));
      ranks.push(...asked.map(([query, wanted]) => ({query, wanted, rank: rankOf(search(index, query), wanted)})));
    }
    const describe = ({query, wanted, rank}) => `${query}: ${wanted} comes ${rank === 0 ? 'nowhere' : `as ${rank}`}`;
    const late = ranks.filter(({rank}) => rank === 0 || rank > LAST);
    ensure(late.length === 0, late.map(describe).join('\n'));
    const second = ranks.filter(({rank}) => rank > 1);
    ensure(second.length <= (1 - FIRST) * ranks.length, second.map(describe).join('\n'));
    return [`${ranks.length - second.length} of ${ranks.length} first`, ...second.map(describe)].join('; ');
  },
  spoils: [{missing: /search-index/, expect: /there is no index/}],
};

/**
 * @param {import('../../src/search/engine.mjs').Result[]} results
 * @param {string} wanted A page, or a section of one, which must then be the first of its page.
 * @returns {number} From 1; 0 for one that is not found.
 */
function rankOf(results, wanted) {
  const [path, anchor] = wanted.split('#');
  const isWanted = ({page, sections}) => page.path === path && (!anchor || sections[0].anchor === anchor);
  return results.findIndex(isWanted) + 1;
}
