/** Which pages stand for the others: one of each template in each language. */

import {unfenced} from './pages.mjs';

const KINDS = [
  ['landing page', /^\/$/],
  ['list of versions', /^\/versions\/$/],
  ['search', /^\/search\/$/],
  ['page that is not found', /^\/404\.html$/],
  ['module', /^\/docs\/(?:[^/]+\/)?api\//],
  ['tutorial', /^\/docs\//],
];
/** What a page may hold that the site draws in its own way, in the author's Markdown. */
const CONSTRUCTS = {
  'a diagram': /^```mermaid/m,
  'a formula': /^\$\$/m,
  tabs: /^<!--- tabs-start/m,
  'an alert': /^> \[!/m,
  'a picture': /!\[/,
  'an output': /^```\w+ output/m,
  'code that is not run': /^<!--- doc-test-ignore-start/m,
  'a table': /^\|/m,
  'an object': /^\{\{ *autodoc:/m,
};

/**
 * The templates that a page is made from; a page of no known kind is a template of its own.
 *
 * @param {string} address
 * @param {string} markdown Its source; empty for a page that is code.
 * @returns {string[]}
 */
export function templatesOf(address, markdown) {
  const [, language, path] = /^(\/zh-Hans)?(\/.*)$/.exec(address);
  const kind = KINDS.find(([, pattern]) => pattern.test(path))?.[0] ?? path;
  const text = unfenced(markdown).join('\n');
  const shown = Object.keys(CONSTRUCTS).filter((name) => CONSTRUCTS[name].test(text));
  return [kind, ...shown.map((name) => `${kind} with ${name}`)].map((name) => `${language ?? ''} ${name}`);
}

/**
 * A few pages that together are made from all templates; always the same of those that could stand for one.
 *
 * @param {Map<string, string>} pages Their sources by their addresses.
 * @returns {string[]}
 */
export function representatives(pages) {
  const ordered = [...pages.keys()].sort();
  const templates = new Map(ordered.map((address) => [address, templatesOf(address, pages.get(address))]));
  const missing = new Set([...templates.values()].flat());
  const chosen = [];
  while (missing.size > 0) {
    const gain = (address) => templates.get(address).filter((name) => missing.has(name)).length;
    const best = ordered.reduce((one, other) => (gain(other) > gain(one) ? other : one));
    templates.get(best).forEach((name) => missing.delete(name));
    chosen.push(best);
  }
  return chosen;
}
