/** All that the search of one version in one language knows. */

import {sectionsOf} from './sections.mjs';

/**
 * An object that a tutorial shows as well as the reference is kept where the reference shows it.
 *
 * @param {{title: string, path: string, isReference: boolean, html: string}[]} docs
 * @param {import('../../src/search/query.mjs').Synonym[]} synonyms
 * @returns {import('../../src/search/engine.mjs').Stored}
 */
export function collect(docs, synonyms) {
  const ordered = [...docs].sort((one, other) => Number(other.isReference) - Number(one.isReference));
  const seen = new Set();
  const sections = ordered.flatMap(({html}, page) =>
    sectionsOf(html)
      .filter(({kind, anchor}) => kind === 0 || (!seen.has(anchor) && seen.add(anchor)))
      .map(({anchor, heading, kind, text, code}) => [page, anchor, heading, kind, text, code]),
  );
  return {pages: ordered.map(({title, path, isReference}) => ({title, path, isReference})), sections, synonyms};
}
