/** The pages of a built site, and the hooks of their sources. */

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
 * The objects that each page must show, by the hooks of its source.
 *
 * @param {string} website The Docusaurus project.
 * @returns {{address: string, hooks: string[]}[]}
 */
export function hookedPages(website) {
  const versions = join(website, 'versions.json');
  const isReleased = existsSync(versions) && JSON.parse(readFileSync(versions, 'utf8')).length > 0;
  return Object.entries(SOURCES).flatMap(([prefix, folder]) =>
    readdirSync(join(website, folder), {recursive: true})
      .map(String)
      .filter((path) => path.endsWith('.md'))
      .map((path) => ({
        address: `/${posix.join(prefix, isReleased ? 'next' : '', path.replace(/\.md$/, ''))}/`,
        hooks: hooksOf(readFileSync(join(website, folder, path), 'utf8')),
      }))
      .filter(({hooks}) => hooks.length > 0),
  );
}

/** @param {string} markdown */
function hooksOf(markdown) {
  let fence = null;
  return markdown.split('\n').flatMap((line) => {
    const mark = FENCE.exec(line)?.[1];
    if (mark) {
      fence = fence === null ? mark : mark.startsWith(fence) ? null : fence;
    }
    return fence === null && HOOK.test(line) ? [HOOK.exec(line)[1]] : [];
  });
}
