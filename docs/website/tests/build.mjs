/**
 * The build itself: a page of every construct comes out as it should, and a page with a fault of every kind that only
 * Docusaurus sees has each of them reported. What our own plugins see is tested in unit/. `npm run test:build`.
 */

import {readFileSync, writeFileSync} from 'node:fs';
import {join} from 'node:path';
import {ensure, launchBrowser, open, withPage} from './browser.mjs';
import {faultsOfLanding, faultsOfPage} from './checks/records.mjs';
import {PROOF, REPOSITORY, build, frontMatter, makeProject, pages, removeProject} from './fixture/project.mjs';
import {outlineOf} from './html.mjs';
import {serve} from './server.mjs';

const PAGE = 'basics/everything.md';

/** What is added to the page, and what the build must say of it. */
const FAULTS = [
  {
    name: 'a dead link',
    text: '[dead](../no/page.md)',
    expect: /link with URL `\.\.\/no\/page\.md` in source file "docs\/basics/,
  },
  {name: 'a dead address', text: '[dead](/docs/nowhere/)', expect: /broken links![\s\S]*linking to \/docs\/nowhere\//},
  {
    name: 'a missing image',
    text: '![gone](../images/gone.svg)',
    expect: /image with URL `\.\.\/images\/gone\.svg` in source file "docs\/basics/,
  },
  {
    name: 'a dead anchor',
    text: '[dead](../get_started/installation.md#no)',
    expect: /broken anchors![\s\S]*linking to \/docs\/get_started\/installation\/#no/,
  },
];

/**
 * The site's configuration, for one build that reports all faults: each of these stops a build where it is found, so
 * that none would be reported after the first. The one that is found last still does.
 */
const LENIENT = `
import config from './docusaurus.config.js';
const settings = [
  [config, 'onBrokenLinks'],
  [config.markdown.hooks, 'onBrokenMarkdownLinks'],
  [config.markdown.hooks, 'onBrokenMarkdownImages'],
];
for (const [part, name] of [...settings, [config, 'onBrokenAnchors']]) {
  if (part[name] !== 'throw') {
    throw new Error(name + ' does not stop the build');
  }
}
settings.forEach(([part, name]) => (part[name] = 'warn'));
export default config;
`;

/** What the page of every construct must show: how often each selector. */
const SHOWN = {
  '.alert-box': 5,
  '[role=tab]': 2,
  '.output': 6,
  '.output-run': 1,
  '.badge-line[data-state=outdated]': 1,
  '.not-run': 1,
  '.run-page': 1,
  '.katex': 2,
  '.katex-display': 1,
  '.docusaurus-mermaid-container svg': 1,
  '.api-entry': 2,
  '.stale-banner': 1,
  '.stale-section': 1,
  '.page-status a[download]': 1,
  '.lead code': 1,
  '.page-about': 1,
  '.fold': 4,
  '.fold .theme-code-block': 8,
  '[class*=codeBlockTitle]': 1,
  details: 5,
};

const failures = [];
await checkWhole();
await checkFaults();
process.stdout.write(`${failures.length} failed\n`);
process.exitCode = failures.length > 0 ? 1 : 0;

/**
 * @param {string} name
 * @param {() => Promise<void>} check
 */
async function report(name, check) {
  try {
    await check();
    process.stdout.write(`ok   ${name}\n`);
  } catch (error) {
    failures.push(name);
    process.stdout.write(`FAIL ${name}\n${error.message.replace(/^/gm, '       ')}\n`);
  }
}

async function checkWhole() {
  const folder = makeProject();
  await report('a page of every construct builds, and shows each of them in both languages', async () => {
    const {code, said} = await build(folder);
    ensure(code === 0, said.slice(-2000));
    const [server, browser] = [await serve(`${folder}/build`), await launchBrowser()];
    try {
      for (const language of ['', '/zh-Hans']) {
        const address = `${server.url}${language}/docs/basics/everything/`;
        await withPage({browser, url: server.url}, (page) => checkShown(page, address));
      }
      await withPage({browser, url: server.url}, (page) => checkPlaceIsKept(page, server.url));
    } finally {
      await Promise.all([browser.close(), server.close()]);
    }
  });
  await report('badges, counts and outputs are those of the records, in both languages', async () => {
    for (const language of ['', 'zh-Hans/']) {
      const faults = faultsOfLanding(htmlOf(folder, language), PROOF);
      for (const path of Object.keys(pages)) {
        faults.push(...faultsOfPage(htmlOf(folder, `${language}docs/${path}`), frontMatter(path, REPOSITORY).page));
      }
      ensure(faults.length === 0, faults.join('\n'));
    }
  });
  await report('with a repository, pages can be edited and objects lead to their code', async () => {
    const links = intoRepository(htmlOf(folder, `docs/${PAGE}`));
    const code = `${REPOSITORY}/blob/main/src/lib.py#L1-L2`;
    const expected = [code, code, `${REPOSITORY}/edit/main/docs/source/en/${PAGE}`];
    ensure(links.join() === expected.join(), `found ${links.join()}`);
  });
  removeProject(folder);
}

/**
 * The HTML of a page of the site that was built.
 *
 * @param {string} folder
 * @param {string} path Of the page below the site, as Markdown; that of a folder ends in a slash.
 */
function htmlOf(folder, path) {
  return readFileSync(join(folder, 'build', path.replace(/\.md$/, ''), 'index.html'), 'utf8');
}

/** @param {string} html */
function intoRepository(html) {
  const addresses = outlineOf(html).links.map(({address}) => address);
  return addresses.filter((address) => /\/(edit|blob)\//.test(address));
}

/** @param {import('playwright-core').Page} page @param {string} address */
async function checkShown(page, address) {
  await open(page, address);
  await page.locator('.docusaurus-mermaid-container svg').waitFor({timeout: 15000});
  for (const [selector, count] of Object.entries(SHOWN)) {
    const found = await page.locator(`article ${selector}`).count();
    ensure(found === count, `${selector}: found ${found}, not ${count}`);
  }
  const words = await page.locator('article').innerText();
  ensure(words.includes('{braces}, a < b and :colons'), 'characters of plain text are lost');
  ensure(!words.includes('vanishes') && !words.includes('doc-test'), 'a comment is shown');
}

/** The switch of languages leads to the same section. @param {import('playwright-core').Page} page @param {string} url */
async function checkPlaceIsKept(page, url) {
  const place = 'docs/basics/everything/#proof';
  await open(page, `${url}/${place}`);
  await page.locator('.navbar .dropdown', {hasText: '简体中文'}).hover();
  const link = page.locator('.navbar .dropdown__link', {hasText: '简体中文'});
  await Promise.all([page.waitForNavigation(), link.click()]);
  ensure(page.url() === `${url}/zh-Hans/${place}`, `the switch led to ${page.url()}`);
  const words = await page.locator('h2#proof').innerText();
  ensure(words.startsWith('证明'), `the section there is ${words}`);
  ensure((await page.locator('article p a[href="#proof"]').count()) === 1, 'the link to the section is not led there');
}

async function checkFaults() {
  const faults = FAULTS.map(({text}) => text).join('\n\n');
  const folder = makeProject({[PAGE]: `${pages[PAGE]}\n${faults}\n`}, '');
  writeFileSync(join(folder, 'lenient.config.js'), LENIENT);
  const {code, said} = await build(folder, '--locale', 'en', '--config', 'lenient.config.js');
  await report('without a repository, no page can be edited and no object leads to its code', async () => {
    const html = htmlOf(folder, `docs/${PAGE}`);
    ensure(html.includes('src/lib.py'), 'the source of an object is not named');
    ensure(intoRepository(html).length === 0, `found ${intoRepository(html).join()}`);
  });
  removeProject(folder);
  await report('the build stops at a fault', async () => ensure(code !== 0, 'it went through'));
  for (const {name, expect} of FAULTS) {
    await report(`the build reports ${name}`, async () => ensure(expect.test(said), said.slice(0, 4000)));
  }
}
