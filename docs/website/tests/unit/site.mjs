/** A site of a few objects and pages in a temporary folder, and the tree that the plugin makes of a page. */

import {mkdirSync, mkdtempSync, rmSync, writeFileSync} from 'node:fs';
import {tmpdir} from 'node:os';
import {dirname, join} from 'node:path';
import {VFile} from 'vfile';
import {unified} from 'unified';
import remarkParse from 'remark-parse';
import remarkDirective from 'remark-directive';
import remarkFrontmatter from 'remark-frontmatter';
import remarkPage from '../../plugins/remark-page.mjs';

const SOURCE = {file: 'src/lib/box.py', line: 3, end: 9};
const EMPTY = {
  bases: [],
  signature: null,
  return_type: null,
  body: [],
  params: [],
  attributes: [],
  returns: null,
  yields: null,
  raises: [],
  examples: [],
  communication: [],
  members: [],
  source: SOURCE,
};

/** @param {string} words */
export const paragraph = (...children) => ({
  type: 'paragraph',
  children: children.map((child) => (typeof child === 'string' ? {type: 'text', value: child} : child)),
});

/**
 * @param {string} name
 * @param {string} kind
 * @param {object} rest
 */
export const apiObject = (name, kind, rest = {}) => ({...EMPTY, name, canonical: name, kind, ...rest});

/**
 * @param {{objects?: object[], pages?: Record<string, string>, version?: string}} content
 * @returns {{folder: string, remove: () => void}}
 */
export function makeSite({objects = [], pages = {}}) {
  const folder = mkdtempSync(join(tmpdir(), 'site-'));
  const write = (path, text) => {
    mkdirSync(dirname(join(folder, path)), {recursive: true});
    writeFileSync(join(folder, path), text);
  };
  const api = JSON.stringify({
    version: '1',
    objects: Object.fromEntries(objects.map((object) => [object.name, object])),
  });
  write('data/api.json', api);
  write('data/versions/0.1.0/api.json', api);
  Object.entries(pages).forEach(([path, text]) => write(path, text));
  return {folder, remove: () => rmSync(folder, {recursive: true})};
}

/**
 * What the plugin makes of a page.
 *
 * @param {{folder: string}} site
 * @param {string} markdown The author's text.
 * @param {{path?: string, page?: object, repository?: string}} place
 * @returns {Promise<{children: object[]}>}
 */
export async function transform(site, markdown, place = {}) {
  const {path = 'docs/basics/box.md', page = {}, repository = 'https://host/repo'} = place;
  const frontMatter = {page: {kind: 'tutorial', source: 'docs/source/en/basics/box.md', ...page}};
  const value = `---\n${JSON.stringify(frontMatter)}\n---\n${markdown}`;
  const file = new VFile({path: join(site.folder, path), value, data: {frontMatter}});
  const processor = unified()
    .use(remarkParse)
    .use(remarkFrontmatter)
    .use(remarkDirective)
    .use(remarkPage, {siteDir: site.folder, repository});
  const tree = await processor.run(processor.parse(file), file);
  return {...tree, children: tree.children.filter(({type}) => type !== 'yaml')};
}

/**
 * The first node below that passes a test.
 *
 * @param {object} node
 * @param {(node: object) => boolean} test
 */
export function find(node, test) {
  return test(node) ? node : (node.children ?? []).map((child) => find(child, test)).find(Boolean);
}

/** @param {object} node @param {string} name */
export const findComponent = (node, name) => find(node, (each) => each.name === name);

/** @param {object} node @param {string} name */
export const prop = (node, name) => node.attributes.find((attribute) => attribute.name === name)?.value;
