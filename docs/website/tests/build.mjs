/**
 * The build itself: a page of every construct comes out as it should, and each fault in a page stops the build with
 * its place. `npm run test:build`.
 */

import {ensure, launchBrowser, open, withPage} from './browser.mjs';
import {build, makeProject, pages, removeProject} from './fixture/project.mjs';
import {serve} from './server.mjs';

const PAGE = 'basics/everything.md';
const whole = pages[PAGE];

/** What is wrong with the page, and what the build must say. Lines are the author's, without the front matter. */
const FAULTS = [
  {name: 'a dead link', text: `${whole}\n[dead](../no/page.md)\n`, expect: /couldn't be resolved|no\/page\.md/},
  {
    name: 'a dead anchor',
    text: `${whole}\n[dead](../get_started/installation.md#no)\n`,
    expect: /broken anchors?[\s\S]*#no/i,
  },
  {name: 'a missing image', text: `${whole}\n![gone](../images/gone.svg)\n`, expect: /gone\.svg/},
  {
    name: 'an unknown object',
    text: '# A\n\ntext\n\n{{ autodoc:lib.Bux }}\n',
    expect: /en\/basics\/everything\.md:5: .*lib\.Bux/,
  },
  {
    name: 'tabs without an end',
    text: '# A\n\n<!--- tabs-start: a -->\n\n**T**\n\nx\n',
    expect: /everything\.md:3: tabs-start/,
  },
];

/** What the page of every construct must show: how often each selector. */
const SHOWN = {
  '.alert-box': 5,
  '[role=tab]': 2,
  '.output': 3,
  '.not-run': 1,
  '.run-page': 1,
  '.katex': 2,
  '.katex-display': 1,
  '.docusaurus-mermaid-container svg': 1,
  '.api-entry': 2,
  '.stale-banner': 1,
  '.stale-section': 1,
  '.page-status a[download]': 1,
  details: 1,
};

const failures = [];
await checkWhole();
for (const fault of FAULTS) {
  await checkFault(fault);
}
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
    } finally {
      await Promise.all([browser.close(), server.close()]);
    }
  });
  removeProject(folder);
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

/** @param {{name: string, text: string, expect: RegExp}} fault */
async function checkFault({name, text, expect}) {
  const folder = makeProject({[PAGE]: text});
  await report(`${name} stops the build`, async () => {
    const {code, said} = await build(folder, '--locale', 'en');
    ensure(code !== 0, 'the build went through');
    ensure(expect.test(said), `the build says otherwise:\n${said.slice(0, 2000)}`);
  });
  removeProject(folder);
}
