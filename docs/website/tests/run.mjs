/**
 * The tests of the built site: `npm test`, or
 * `node tests/run.mjs [--site FOLDER] [--only WORD] [--touched FILE] [--self-test]`.
 *
 * Links, anchors and files of all pages are checked in their HTML. A real browser opens every page; with `--touched`
 * one page of each template and language, and those that the file names: `{"pages": ["/docs/..."]}`,
 * which `python docs_build.py site --test` writes.
 *
 * `--self-test` spoils the site in the ways that each check names, and passes if the check fails each time.
 */

import {existsSync, readFileSync} from 'node:fs';
import {join, resolve} from 'node:path';
import {fileURLToPath} from 'node:url';
import {parseArgs} from 'node:util';
import {launchBrowser} from './browser.mjs';
import {access} from './checks/access.mjs';
import {budget} from './checks/budget.mjs';
import {clicks} from './checks/clicks.mjs';
import {figures} from './checks/figures.mjs';
import {keyboard} from './checks/keyboard.mjs';
import {links} from './checks/links.mjs';
import {notFound, opening, withoutScripts} from './checks/opening.mjs';
import {chooser, copying, language, modes, versions} from './checks/reading.mjs';
import {queries} from './checks/queries.mjs';
import {records} from './checks/records.mjs';
import {anchors, scrolling} from './checks/reference.mjs';
import {search} from './checks/search.mjs';
import {allPages, hooksOf, sources} from './pages.mjs';
import {serve} from './server.mjs';
import {representatives, templatesOf} from './templates.mjs';

const WEBSITE = fileURLToPath(new URL('..', import.meta.url));
const CHECKS = [
  links,
  records,
  anchors,
  opening,
  scrolling,
  withoutScripts,
  notFound,
  language,
  search,
  queries,
  clicks,
  modes,
  copying,
  versions,
  chooser,
  keyboard,
  access,
  figures,
  budget,
];
const TABS = ' tutorial with tabs';
/** The pages that stand for all when the site is spoilt. */
const SAMPLE = ['/', '/docs/basics/booster_api/'];

const {values: options} = parseArgs({
  options: {
    site: {type: 'string', default: process.env.SITE ?? join(WEBSITE, '../../build/site')},
    only: {type: 'string', default: ''},
    touched: {type: 'string'},
    'self-test': {type: 'boolean', default: false},
  },
});
const folder = resolve(options.site);
if (!existsSync(join(folder, 'index.html'))) {
  process.stderr.write(`The tests open a built site. Found none in ${folder}. Run: npm run build\n`);
  process.exit(2);
}
const browser = await launchBrowser();
const started = performance.now();
const checks = CHECKS.filter(({name}) => name.includes(options.only));
const failures = options['self-test'] ? await proveChecks(checks) : await runChecks(checks);
await browser.close();
process.stdout.write(`${failures} failed, ${((performance.now() - started) / 1000).toFixed(0)} s\n`);
process.exitCode = failures > 0 ? 1 : 0;

/** @param {object[]} selected */
async function runChecks(selected) {
  let failed = 0;
  for (const check of selected) {
    const {error, said, seconds} = await attempt(check, {});
    failed += error ? 1 : 0;
    process.stdout.write(`${error ? 'FAIL' : 'ok  '} ${check.name} (${said ?? ''} ${seconds} s)\n`);
    if (error) {
      process.stdout.write(`${error.message.replace(/^/gm, '       ')}\n`);
    }
  }
  return failed;
}

/** @param {object[]} selected */
async function proveChecks(selected) {
  let failed = 0;
  for (const check of selected) {
    for (const spoil of check.spoils) {
      const {error, seconds} = await attempt(check, spoil);
      const isSeen = error !== null && spoil.expect.test(error.message);
      failed += isSeen ? 0 : 1;
      process.stdout.write(`${isSeen ? 'ok  ' : 'FAIL'} ${spoil.expect} makes it fail: ${check.name} (${seconds} s)\n`);
      if (!isSeen) {
        process.stdout.write(`       ${error ? `failed otherwise: ${error.message.slice(0, 400)}` : 'it passed'}\n`);
      }
    }
  }
  return failed;
}

/**
 * Run a check on the site, spoilt or as it is.
 *
 * @param {object} check
 * @param {import('./server.mjs').Spoil} spoil
 */
async function attempt(check, spoil) {
  const server = await serve(folder, spoil);
  const pages = options['self-test'] ? SAMPLE : allPages(folder);
  const markdown = sources(WEBSITE);
  const hooked = [...markdown].map(([address, text]) => ({address, hooks: hooksOf(text)}));
  const site = {
    browser,
    url: server.url,
    folder,
    website: WEBSITE,
    pages,
    markdown,
    opened: openedPages(pages, markdown),
    hooked: hooked.filter(({address, hooks}) => hooks.length > 0 && pages.includes(address)),
    withTabs: allPages(folder).filter((address) => templatesOf(address, markdown.get(address) ?? '').includes(TABS)),
  };
  const begun = performance.now();
  const seconds = () => ((performance.now() - begun) / 1000).toFixed(1);
  try {
    const said = await check.run(site);
    return {error: null, said, seconds: seconds()};
  } catch (error) {
    return {error, seconds: seconds()};
  } finally {
    await server.close();
  }
}

/**
 * @param {string[]} pages
 * @param {Map<string, string>} markdown
 */
function openedPages(pages, markdown) {
  const {pages: touched} = options.touched ? JSON.parse(readFileSync(options.touched, 'utf8')) : {pages: null};
  if (touched === null) {
    return pages;
  }
  const templates = representatives(new Map(pages.map((address) => [address, markdown.get(address) ?? ''])));
  return pages.filter((address) => templates.includes(address) || touched.includes(address));
}
