/** The pages of a built site, their sources, and the hooks in these. */

import {existsSync, readFileSync, readdirSync} from 'node:fs';
import {join, posix} from 'node:path';

const HOOK = /^\{\{ *autodoc: *([\w.]+) *\}\}$/;
const FENCE = /^(`{3,}|~{3,})/;
/** Where the sources of each language lie below docs/website, and its pages below the site. */
const SOURCES = {
  'docs/': 'docs',
  'zh-Hans/docs/': 'i18n/zh-Hans/docusaurus-plugin-content-docs/current',
};

/**
 * The addresses of all pages, from a walk over the files.
 *
 * @param {string} folder The built site.
 */
export function allPages(folder) {
  return readdirSync(folder, {recursive: true})
    .map((path) => String(path).replaceAll('\\', '/'))
    .filter((path) => path.endsWith('.html'))
    .map((path) => `/${path.replace(/(^|\/)index\.html$/, '$1')}`)
    .sort();
}

/**
 * The Markdown of the pages that are written on now, by their addresses.
 *
 * @param {string} website The Docusaurus project.
 * @returns {Map<string, string>}
 */
export function sources(website) {
  const versions = join(website, 'versions.json');
  const isReleased = existsSync(versions) && JSON.parse(readFileSync(versions, 'utf8')).length > 0;
  const address = (prefix, path) => `/${posix.join(prefix, isReleased ? 'next' : '', path.replace(/\.md$/, ''))}/`;
  return new Map(
    Object.entries(SOURCES).flatMap(([prefix, folder]) =>
      readdirSync(join(website, folder), {recursive: true})
        .map(String)
        .filter((path) => path.endsWith('.md'))
        .map((path) => [address(prefix, path), readFileSync(join(website, folder, path), 'utf8')]),
    ),
  );
}

/**
 * The objects that a page must show.
 *
 * @param {string} markdown
 * @returns {string[]}
 */
export const hooksOf = (markdown) =>
  unfenced(markdown)
    .filter((line) => HOOK.test(line))
    .map((line) => HOOK.exec(line)[1]);

/**
 * The lines that are no code, and those that open and close code.
 *
 * @param {string} markdown
 * @returns {string[]}
 */
export function unfenced(markdown) {
  let fence = null;
  return markdown.split('\n').filter((line) => {
    const mark = FENCE.exec(line)?.[1];
    const isOutside = fence === null;
    if (mark && (isOutside || mark.startsWith(fence))) {
      fence = isOutside ? mark : null;
      return true;
    }
    return isOutside;
  });
}
