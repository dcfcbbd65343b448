/** The documented objects of each version, and where on the site each of them stands. */

import {existsSync, readFileSync, readdirSync} from 'node:fs';
import {join, posix} from 'node:path';

/**
 * @typedef {{name: string, kind: string, type: string | null, default: string | null}} Argument
 * @typedef {{type: string | null, body: object[]}} Described
 * @typedef {{
 *   name: string, canonical: string, alias_of?: string | null, kind: string,
 *   source: {file: string, line: number, end: number} | null,
 *   bases: string[], signature: Argument[] | null, return_type: string | null, body: object[],
 *   params: {name: string, type: string | null, default: string | null, body: object[]}[],
 *   attributes: {name: string, type: string | null, body: object[]}[], returns: Described | null,
 *   yields: Described | null, raises: {type: string, body: object[]}[], examples: string[],
 *   communication: object[], members: string[],
 * }} ApiObject
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HOOK_LINE = /^ {0,3}\{\{\s*autodoc:\s*([A-Za-z_][\w.]*)\s*\}\}\s*$/;
/** What a type can name. */
const TYPES = new Set(['class', 'exception', 'data', 'attribute']);

export class ApiLibrary {
  /**
   * @param {string} siteDir
   * @param {string} repository Its address; empty for none.
   */
  constructor(siteDir, repository) {
    this.siteDir = siteDir;
    this.repository = repository;
    /** @type {Map<string, ApiVersion>} */
    this.versions = new Map();
  }

  /** @param {string} version */
  of(version) {
    if (!this.versions.has(version)) {
      this.versions.set(version, new ApiVersion(this.siteDir, this.repository, version));
    }
    return this.versions.get(version);
  }
}

class ApiVersion {
  /**
   * @param {string} siteDir
   * @param {string} repository Its address; empty for none.
   * @param {string} version
   */
  constructor(siteDir, repository, version) {
    const isCurrent = version === 'current';
    const data = join(siteDir, 'data', ...(isCurrent ? [] : ['versions', version]), 'api.json');
    /** @type {Record<string, ApiObject>} */
    this.objects = JSON.parse(readFileSync(data, 'utf8')).objects;
    /** Where the code of this version is on the web; null where no repository is configured. */
    this.tree = repository ? `${repository}/blob/${isCurrent ? 'main' : `v${version}`}` : null;
    this.pages = findPages(join(siteDir, ...(isCurrent ? ['docs'] : ['versioned_docs', `version-${version}`])), this);
    this.shortNames = this.#indexShortNames();
  }

  /**
   * The address of an object, from a page; null if no page shows it.
   *
   * @param {string} name
   * @param {string} from The path of the page that links, such as `basics/booster_api.md`.
   * @param {Set<string>} here The objects that this page itself shows.
   */
  address(name, from, here) {
    if (here.has(name)) {
      return `#${name}`;
    }
    const page = this.pages.get(name);
    return page ? `${posix.relative(posix.dirname(from), page).replace(/^(?!\.)/, './')}#${name}` : null;
  }

  /**
   * The object that a name within a type means: its documented path, or its last part if that is clear.
   *
   * @param {string} word
   */
  resolve(word) {
    return word in this.objects ? word : (this.shortNames.get(word.split('.').at(-1)) ?? null);
  }

  /**
   * The address of an object's code, if it has one.
   *
   * @param {ApiObject} object
   */
  codeAddress({source}) {
    return source && this.tree ? `${this.tree}/${source.file}#L${source.line}-L${source.end}` : undefined;
  }

  /** Short names that mean one object; one that is documented under several paths counts as one. */
  #indexShortNames() {
    const found = new Map();
    for (const object of Object.values(this.objects).filter(({kind}) => TYPES.has(kind))) {
      const short = object.name.split('.').at(-1);
      found.set(short, [...(found.get(short) ?? []), object]);
    }
    const index = new Map();
    for (const [short, objects] of found) {
      if (new Set(objects.map(({canonical}) => canonical)).size === 1) {
        const shown = objects.filter(({name}) => this.pages.has(name));
        index.set(
          short,
          (shown.length > 0 ? shown : objects).map(({name}) => name).sort((a, b) => b.length - a.length)[0],
        );
      }
    }
    return index;
  }
}

/**
 * Which page shows which object: pages of the reference before tutorials.
 *
 * @param {string} folder
 * @param {ApiVersion} api
 * @returns {Map<string, string>}
 */
function findPages(folder, api) {
  const pages = new Map();
  const files = existsSync(folder) ? readdirSync(folder, {recursive: true}).map(String) : [];
  const paths = files.filter((path) => path.endsWith('.md')).map((path) => path.replaceAll('\\', '/'));
  paths.sort((a, b) => Number(b.startsWith('api/')) - Number(a.startsWith('api/')) || (a < b ? -1 : 1));
  for (const path of paths) {
    for (const name of hooksIn(readFileSync(join(folder, path), 'utf8'))) {
      for (const shown of [name, ...(api.objects[name]?.members ?? [])]) {
        if (!pages.has(shown)) {
          pages.set(shown, path);
        }
      }
    }
  }
  return pages;
}

/**
 * The hooks of a page, outside of its fences.
 *
 * @param {string} markdown
 */
function hooksIn(markdown) {
  const hooks = [];
  let fence = null;
  for (const line of markdown.split('\n')) {
    const mark = FENCE.exec(line)?.[1];
    if (fence) {
      fence = mark?.startsWith(fence) && line.trim() === mark ? null : fence;
    } else if (mark) {
      fence = mark;
    } else if (HOOK_LINE.test(line)) {
      hooks.push(HOOK_LINE.exec(line)[1]);
    }
  }
  return hooks;
}
