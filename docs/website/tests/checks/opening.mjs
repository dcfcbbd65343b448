/** Pages open cleanly, wide and narrow, with all its pictures, and can be read without scripts. */

import {DESKTOP, PHONE, ensure, open, visitAll, withPage} from '../browser.mjs';
import {repeat} from '../spoil.mjs';

export const opening = {
  name: 'pages open without an error, a remote request or sideways scrolling',
  async run(site) {
    await visitAll(site, site.opened, async (page, address, complaints) => {
      await page.setViewportSize(PHONE);
      await open(page, site.url + address);
      await checkWidth(page, PHONE);
      await checkFades(page);
      await page.setViewportSize(DESKTOP);
      await checkWidth(page, DESKTOP);
      await checkPictures(page);
      forgive404(address, complaints, site.url);
    });
    return `${site.opened.length} of ${site.pages.length} pages`;
  },
  spoils: [
    {html: '<script>console.error("spoilt")</script>', expect: /console error: spoilt/},
    {html: '<script>throw new Error("spoilt")</script>', expect: /uncaught error: spoilt/},
    {html: '<img src="http://192.0.2.1/pixel.png" alt="">', expect: /remote request: http:\/\/192\.0\.2\.1/},
    {html: '<script src="/nothing.js"></script>', expect: /answer 404.*nothing\.js/},
    {html: '<div style="width:420px;height:1px"></div>', expect: /scrolls sideways at 390/},
    {html: '<img src="data:image/png;base64,AAAA" alt="">', expect: /no picture/},
    {html: '<style>pre{mask:none!important}</style>', expect: /does not show it/},
  ],
};

/**
 * @param {import('playwright-core').Page} page
 * @param {{width: number}} viewport
 */
async function checkWidth(page, {width}) {
  const needed = await page.evaluate(() => document.documentElement.scrollWidth);
  ensure(needed <= width, `scrolls sideways at ${width}: needs ${needed}`);
}

/**
 * Code and tables that are wider than their frame, and not folded, fade at its edge.
 *
 * @param {import('playwright-core').Page} page
 */
async function checkFades(page) {
  const isMarked = () =>
    [...document.querySelectorAll('.theme-code-block pre, .table-frame, .matrix-frame')]
      .filter((frame) => !frame.closest('details:not([open])') && frame.scrollWidth > frame.clientWidth + 1)
      .every((frame) => getComputedStyle(frame).maskImage !== 'none');
  const wait = page.waitForFunction(isMarked, null, {timeout: 5000});
  await wait.catch(() => ensure(false, 'what is cut off at 390 does not show it'));
}

/** @param {import('playwright-core').Page} page */
async function checkPictures(page) {
  const missing = await page.evaluate(async () => {
    const pictures = [...document.images];
    await Promise.all(
      pictures.map((picture) => {
        picture.loading = 'eager';
        return picture.decode().catch(() => undefined);
      }),
    );
    return pictures.filter(({naturalWidth}) => naturalWidth === 0).map(({src}) => src.slice(0, 80));
  });
  ensure(missing.length === 0, `no picture behind ${missing.join(', ')}`);
}

/**
 * The page for addresses that do not exist answers with 404, as it must.
 *
 * @param {string} address
 * @param {string[]} complaints
 * @param {string} url
 */
function forgive404(address, complaints, url) {
  if (address.endsWith('/404.html')) {
    const own = complaints.filter((text) => !text.includes(url + address) && !text.includes('404 (Not Found)'));
    complaints.splice(0, complaints.length, ...own);
  }
}

export const withoutScripts = {
  name: 'pages can be read without scripts',
  async run(site) {
    await withPage(
      site,
      async (page) => {
        await page.goto(`${site.url}/docs/basics/booster_api/`);
        ensure((await page.locator('main pre').count()) > 10, 'no code without scripts');
        ensure((await page.locator('.api-signature').count()) > 5, 'no signatures without scripts');
        await page.goto(`${site.url}/zh-Hans/`);
        ensure((await page.locator('main h2').count()) >= 3, 'no first page without scripts');
        await page.goto(`${site.url}/zh-Hans/features/`);
        ensure((await page.locator('main td').count()) > 20, 'no features without scripts');
      },
      {javaScriptEnabled: false},
    );
    return '3 pages';
  },
  spoils: [{replace: [/<main/g, '<aside'], expect: /without scripts/}],
};

export const notFound = {
  name: 'unknown addresses lead to a page that helps, in both languages',
  async run(site) {
    for (const [address, words] of [
      ['/no/such', 'Page not found'],
      ['/zh-Hans/no/such', '页面不存在'],
    ]) {
      await withPage(site, async (page, complaints) => {
        const response = await page.goto(site.url + address);
        ensure(response.status() === 404, `${address} answers ${response.status()}`);
        ensure(
          (await page.locator('h1').innerText()) === words,
          `${address} says ${await page.locator('h1').innerText()}`,
        );
        const addresses = await page
          .locator('.navbar [lang]')
          .evaluateAll((links) => links.map((link) => link.pathname));
        ensure(addresses.join() === '/,/zh-Hans/', `${address} leads to the languages at ${addresses.join()}`);
        complaints.length = 0;
      });
    }
    return '2 addresses';
  },
  spoils: [
    {replace: [/<h1[\s\S]*?<\/h1>/g, '<h1>x</h1>'], noScripts: true, expect: /says/},
    {html: repeat('document.querySelector("a[lang=en]").href = "/404/"'), expect: /leads to the languages at \/404/},
  ],
};
