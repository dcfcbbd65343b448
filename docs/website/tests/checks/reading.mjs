/** What a reader does on a page: another language, another mode, copying, choosing. */

import {readFileSync} from 'node:fs';
import {join} from 'node:path';
import {ensure, open, withPage} from '../browser.mjs';
import {repeat} from '../spoil.mjs';

const PAGE = '/docs/basics/booster_api/';

export const language = {
  name: 'the language switch keeps the page and the place on it, there and back',
  async run(site) {
    await withPage(site, async (page) => {
      await open(page, site.url + PAGE);
      const heading = await page.locator('article h2').last().getAttribute('id');
      for (const address of [PAGE, `${PAGE}#${heading}`, '/', '/versions/', '/features/']) {
        await open(page, site.url + address);
        await switchTo(page, '简体中文');
        ensure(pathOf(page) === `/zh-Hans${address}`, `${address} became ${pathOf(page)}`);
        ensure(
          (await page.locator('html').getAttribute('lang')) === 'zh-Hans',
          `${pathOf(page)} is not marked as Chinese`,
        );
        const isThere = !address.includes('#') || (await page.locator(`[id="${heading}"]`).count()) === 1;
        ensure(isThere, `${pathOf(page)} has no such heading`);
        await switchTo(page, 'English');
        ensure(pathOf(page) === address, `${address} came back as ${pathOf(page)}`);
      }
    });
    return '5 places';
  },
  spoils: [
    {html: repeat('document.querySelector("a[lang=zh-Hans]").href = "/zh-Hans/"'), expect: /became \/zh-Hans\//},
    {
      html: repeat('document.querySelectorAll("[lang=zh-Hans] h2").forEach((heading) => (heading.id = "x"))'),
      expect: /has no such heading/,
    },
  ],
};

/**
 * @param {import('playwright-core').Page} page
 * @param {string} label
 */
async function switchTo(page, label) {
  const dropdown = page.locator('.navbar .dropdown', {hasText: '简体中文'});
  await dropdown.hover();
  await Promise.all([page.waitForNavigation(), dropdown.locator('.dropdown__link', {hasText: label}).click()]);
  await page.waitForFunction(() => document.documentElement.dataset.hasHydrated === 'true');
}

/** @param {import('playwright-core').Page} page */
function pathOf(page) {
  const {pathname, hash} = new URL(page.url());
  return pathname + hash;
}

export const modes = {
  name: 'light and dark follow the system, can be chosen, and stay chosen',
  async run(site) {
    await withPage(
      site,
      async (page) => {
        await open(page, site.url + PAGE);
        const mode = () => page.locator('html').getAttribute('data-theme');
        const ground = () => page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
        ensure((await mode()) === 'dark', `a dark system gives ${await mode()}`);
        const dark = await ground();
        for (let clicks = 0; clicks < 2 && (await mode()) !== 'light'; clicks += 1) {
          await page.locator('.navbar button[class*=toggleButton]').click();
        }
        ensure((await mode()) === 'light', 'the button does not lead to light');
        ensure((await ground()) !== dark, 'light and dark have the same ground');
        await page.reload();
        ensure((await mode()) === 'light', 'light is forgotten');
      },
      {colorScheme: 'dark'},
    );
    return 'dark, light, reload';
  },
  spoils: [{html: '<style>html{background:#000!important}</style>', expect: /same ground/}],
};

export const copying = {
  name: 'the copy button copies the code',
  async run(site) {
    await withPage(
      site,
      async (page) => {
        await open(page, site.url + PAGE);
        const block = page.locator('.theme-code-block.language-python').first();
        await block.hover();
        await block.locator('button[class*=copyButton], button[aria-label]').last().click({timeout: 3000});
        const copied = await page.evaluate(() => navigator.clipboard.readText());
        const code = (await block.locator('code').innerText()).trim();
        ensure(squeeze(copied) === squeeze(code), `copied ${JSON.stringify(copied.slice(0, 60))}`);
      },
      {permissions: ['clipboard-read', 'clipboard-write']},
    );
    return '1 block';
  },
  spoils: [
    {
      html:
        '<script>navigator.clipboard.writeText=()=>Promise.resolve();' +
        'addEventListener("copy",(event)=>{event.preventDefault();event.clipboardData.setData("text/plain","x")},true)</script>',
      expect: /copied/,
    },
  ],
};

/** @param {string} text Line breaks of the layout are no part of the code. */
const squeeze = (text) => text.replace(/\s+/g, ' ').trim();

export const versions = {
  name: 'the version menu lists the versions, and all of them have a page',
  async run(site) {
    const released = JSON.parse(readFileSync(join(site.website, 'versions.json'), 'utf8'));
    await withPage(site, async (page) => {
      await open(page, site.url + PAGE);
      const dropdown = page.locator('.navbar .dropdown', {has: page.locator('[href$="/versions/"]')});
      await dropdown.hover();
      // The menu fades in; what is not visible yet has no words.
      await dropdown.locator('.dropdown__link').first().waitFor();
      const labels = await dropdown.locator('.dropdown__link').allInnerTexts();
      const expected = ['main', ...released];
      const missing = expected.filter((label) => !labels.includes(label));
      ensure(missing.length === 0, `the menu lacks ${missing.join(', ')}`);
      await dropdown.locator('[href$="/versions/"]').click();
      await page.waitForURL('**/versions/');
      const listed = await page.locator('.version-list a').allInnerTexts();
      ensure(listed.length === expected.length, `listed are ${listed.join(', ')}`);
    });
    return ['main', ...released].join(', ');
  },
  spoils: [
    {html: repeat('document.querySelector(".dropdown__menu a").textContent = "x"'), expect: /lacks main/},
    {
      html:
        '<script>new MutationObserver(()=>document.querySelectorAll(".version-list:not(.spoilt)").forEach((list)=>{' +
        'list.classList.add("spoilt");list.append(document.createElement("a"))}))' +
        '.observe(document,{childList:true,subtree:true})</script>',
      expect: /listed are/,
    },
  ],
};

export const chooser = {
  name: 'the plugin chooser answers to the keyboard, and its answer is in the address',
  async run(site) {
    const {plugins} = JSON.parse(readFileSync(join(site.website, 'data', 'landing.json'), 'utf8'));
    await withPage(site, async (page) => {
      await open(page, `${site.url}/`);
      const seen = new Set();
      const name = () => page.locator('.chooser-answer .plugin-name code').first().innerText();
      const first = await name();
      for (const key of ['workers', 'fits', 'goal']) {
        await page.locator(`.chooser input[name=${key}]:checked`).focus();
        const answers = await page.locator(`.chooser input[name=${key}]`).count();
        for (let step = 0; step < answers; step += 1) {
          await page.keyboard.press('ArrowDown');
          seen.add(await name());
        }
      }
      ensure(seen.size > 1, `whatever is answered, the choice is ${[...seen].join()}`);
      const unknown = [...seen].filter((choice) => !plugins.some((plugin) => plugin.name === choice));
      ensure(unknown.length === 0, `no such plugin: ${unknown.join(', ')}`);
      const chosen = await name();
      await open(page, page.url());
      await page.locator('.chooser-answer .plugin-name code', {hasText: chosen}).waitFor({timeout: 3000});
      const question = {workers: 'many', fits: 'none', goal: 'speed'};
      const expected = plugins.find(({when}) =>
        Object.keys(question).every((key) => when[key].includes(question[key])),
      );
      await open(page, `${site.url}/?${new URLSearchParams(question)}`);
      ensure((await name()) === expected.name, `the address of ${expected.name} shows ${await name()}`);
      const code = await page.locator('.chooser-answer pre').first().innerText();
      ensure(code.includes(`import ${expected.name}`), `the code of ${expected.name} does not import it`);
      await open(page, `${site.url}/?workers=no&x=y`);
      ensure((await name()) === first, `a wrong address shows ${await name()}, not ${first}`);
    });
    return 'answers by arrow keys, and by address';
  },
  spoils: [
    {
      html: '<script>addEventListener("keydown",(event)=>event.preventDefault(),true)</script>',
      expect: /whatever is answered/,
    },
    {
      html: '<script>location.search && history.replaceState(null, "", "/")</script>',
      expect: /Timeout|the address of .* shows/,
    },
  ],
};
