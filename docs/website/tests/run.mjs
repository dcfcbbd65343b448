/**
 * The tests of the built site in a real browser: `npm test`, or
 * `node tests/run.mjs [--site FOLDER] [--only WORD] [--self-test]`.
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
import {keyboard} from './checks/keyboard.mjs';
import {notFound, opening, withoutScripts} from './checks/opening.mjs';
import {chooser, copying, downloads, language, modes, versions} from './checks/reading.mjs';
import {anchors} from './checks/reference.mjs';
import {search} from './checks/search.mjs';
import {allPages, hookedPages} from './pages.mjs';
import {serve} from './server.mjs';

const WEBSITE = fileURLToPath(new URL('..', import.meta.url));
const CHECKS = [
  opening,
  withoutScripts,
  notFound,
  anchors,
  language,
  search,
  modes,
  copying,
  versions,
  downloads,
  chooser,
  keyboard,
  access,
  budget,
];
/** The pages that stand for all when the site is spoilt. */
const SAMPLE = ['/', '/docs/basics/booster_api/'];

const {values: options} = parseArgs({
  options: {
    site: {type: 'string', default: process.env.SITE ?? join(WEBSITE, '../../build/site')},
    only: {type: 'string', default: ''},
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
  const isWhole = !options['self-test'];
  const pages = allPages(folder);
  const hooked = hookedPages(WEBSITE).filter(({address}) => isWhole || SAMPLE.includes(address));
  const site = {
    browser,
    url: server.url,
    folder,
    website: WEBSITE,
    pages: isWhole ? pages : pages.filter((address) => SAMPLE.includes(address)),
    hooked,
    withTabs: pages.filter((address) => /role="?tab/.test(readPage(address))),
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

/** @param {string} address */
function readPage(address) {
  return readFileSync(join(folder, address.endsWith('/') ? `${address}index.html` : address), 'utf8');
}
