/** Links, anchors, pictures and scripts of all pages, in their HTML: nothing is opened. */

import {readFileSync} from 'node:fs';
import {join} from 'node:path';
import {ensure} from '../browser.mjs';
import {outlineOf} from '../html.mjs';
import {Repository} from '../repository.mjs';

const OWN = 'http://site';
const MAY_LEAVE = new Set(['a', 'area']);
const INLINE = new Set(['data:', 'blob:']);
/** Links to pages of this site by the address of the host where it will stand. */
const NAMES_THE_HOST = new Set(['canonical', 'alternate']);
/** The page for addresses without one stands at any of them; where it links itself, it means the reader's. */
const NOT_FOUND = /^(\/zh-Hans)?\/404(\.html)?\/$/;
/** What a style sheet loads. */
const LOADED = /url\(["']?(?!data:)([^"')]+)["']?\)/g;

export const links = {
  name: 'every link, anchor, picture, script and download of every page is there',
  async run({url, pages, website}) {
    const site = JSON.parse(readFileSync(join(website, 'data', 'site.json'), 'utf8'));
    const repository = new Repository(site.repository, join(website, '../..'));
    const load = async (path) => {
      const answer = await fetch(url + path, {headers: {'Accept-Encoding': 'identity'}});
      return answer.ok ? answer.text() : null;
    };
    const {faults, counts} = await findDeadLinks(pages, load, repository);
    ensure(faults.length === 0, faults.join('\n'));
    ensure(counts.downloads > 0, 'no page offers a download');
    ensure(Boolean(site.repository) === counts.repository > 0, 'no page can be edited, and there is a repository');
    return Object.entries(counts)
      .map(([what, count]) => `${count} ${what}`)
      .join(', ');
  },
  spoils: [
    {html: '<a href="/docs/gone/">x</a>', expect: /links to \/docs\/gone\/, and there is nothing/},
    {html: '<a href="/docs/basics/booster_api/#gone">x</a>', expect: /there is no such anchor/},
    {html: '<img src="/img/gone.svg" alt="">', expect: /links to \/img\/gone\.svg/},
    {html: '<script src="//192.0.2.1/x.js"></script>', expect: /loads .*192\.0\.2\.1.* from elsewhere/},
    {html: '<a href="https://elsewhere.org/x/edit/main/docs/x.md">x</a>', expect: /links to .*elsewhere.*, and/},
    {missing: /^\/downloads\//, expect: /links to \/downloads\//},
    {missing: /\.woff2$/, expect: /\.css links to .*\.woff2/},
  ],
};

/**
 * @param {string[]} pages The addresses of all pages.
 * @param {(path: string) => Promise<string | null>} load What stands at a path of the site; null for nothing.
 * @param {Repository} repository
 * @returns {Promise<{faults: string[], counts: Record<string, number>}>}
 */
export async function findDeadLinks(pages, load, repository) {
  const files = new Map();
  const read = (path) => files.get(path) ?? files.set(path, load(path)).get(path);
  const outlines = new Map();
  for (const address of pages) {
    outlines.set(address, outlineOf((await read(address)) ?? ''));
  }
  const found = new Map();
  const counts = {links: 0, anchors: 0, files: 0, downloads: 0};
  for (const [address, {links: linked}] of outlines) {
    for (const link of linked) {
      const fault = await faultOf(link, address, {outlines, read, counts, repository});
      if (fault) {
        found.set(fault, [...(found.get(fault) ?? []), address]);
      }
    }
  }
  const styles = [...files.keys()].filter((path) => path.endsWith('.css'));
  for (const path of styles) {
    for (const [, address] of ((await read(path)) ?? '').matchAll(LOADED)) {
      const loaded = new URL(address, OWN + path).pathname;
      if ((await read(loaded)) === null) {
        found.set(`links to ${loaded}, and there is nothing`, [path]);
      }
    }
  }
  counts.files = files.size - pages.length;
  counts.repository = repository.count;
  return {faults: [...found].map(([fault, places]) => `${sayPlaces(places)} ${fault}`), counts};
}

/** @param {string[]} places A link of the frame stands on every page. */
const sayPlaces = (places) => (places.length > 3 ? `${places[0]} and ${places.length - 1} more` : places.join(', '));

/**
 * @param {import('../html.mjs').Link} link
 * @param {string} address The page that it stands on.
 * @param {{outlines: Map<string, object>, read: (path: string) => Promise<string | null>, counts: object,
 *   repository: Repository}} site
 * @returns {Promise<string | null>}
 */
async function faultOf(link, address, {outlines, read, counts, repository}) {
  const target = new URL(link.address, OWN + address);
  const isOwn = target.origin === OWN || NAMES_THE_HOST.has(link.rel);
  if (!isOwn) {
    const isFree = MAY_LEAVE.has(link.tag) || INLINE.has(target.protocol);
    return isFree ? repository.faultOf(link.address) : `loads ${link.address} from elsewhere`;
  }
  if (NOT_FOUND.test(target.pathname)) {
    return null;
  }
  counts.links += 1;
  counts.downloads += link.isDownload ? 1 : 0;
  const anchor = decodeURIComponent(target.hash.slice(1));
  const outline = outlines.get(target.pathname) ?? outlines.get(`${target.pathname}/`);
  if (!outline) {
    return (await read(target.pathname)) === null ? `links to ${target.pathname}, and there is nothing` : null;
  }
  counts.anchors += anchor ? 1 : 0;
  const isThere = anchor === '' || outline.ids.has(anchor);
  return isThere ? null : `links to ${target.pathname}#${anchor}, and there is no such anchor`;
}
