/** The search in the browser, without any server. */

import {ensure, open, withPage} from '../browser.mjs';

const QUERIES = [
  ['/docs/get_started/installation/', 'optimizer', '/docs/'],
  ['/zh-Hans/docs/get_started/installation/', '显存', '/zh-Hans/docs/'],
];

/** Where the list of results takes the keys. */
const CHOSEN = '.search-option[aria-selected=true]';

export const search = {
  name: 'the search finds English and Chinese words, and the page found marks them',
  async run(site) {
    for (const [address, word, prefix] of QUERIES) {
      await withPage(site, async (page) => {
        await open(page, site.url + address);
        await page.keyboard.press('Control+k');
        await page.keyboard.type(word);
        const hit = page.locator('.search-option mark').first();
        await hit.waitFor({timeout: 10000}).catch(() => ensure(false, `${word}: found nothing`));
        await checkKeys(page, word);
        await page.keyboard.press('Enter');
        await page.waitForURL((url) => url.pathname.startsWith(prefix) && url.pathname !== address, {timeout: 5000});
        await checkMarks(page, word);
        await open(page, `${site.url}${prefix.replace('docs/', 'search/')}?q=${encodeURIComponent(word)}`);
        await page.locator('main .search-results mark').first().waitFor({timeout: 10000});
      });
    }
    return QUERIES.map(([, word]) => word).join(', ');
  },
  spoils: [
    {html: '<script>CSS.highlights.set=()=>{}</script>', expect: /nothing is marked/},
    {
      html: '<script>addEventListener("keydown",(event)=>/^Arrow/.test(event.key)&&event.stopImmediatePropagation(),{capture:true})</script>',
      expect: /arrow key/,
    },
    {missing: /search-index/, expect: /found nothing/},
  ],
};

/** The arrow keys choose a result, Escape closes the list, and typing opens it again. */
async function checkKeys(page, word) {
  const chosen = () => page.locator(CHOSEN).getAttribute('id');
  const first = await chosen();
  await page.keyboard.press('ArrowDown');
  const isNext = (await chosen()) !== first;
  ensure(isNext, `${word}: the arrow key chooses no other result`);
  await page.keyboard.press('ArrowUp');
  ensure((await chosen()) === first, `${word}: the arrow key does not lead back`);
  await page.keyboard.press('Escape');
  ensure(await page.locator('.search-panel').isHidden(), `${word}: Escape leaves the list open`);
  await page.keyboard.press('ArrowDown');
  await page.keyboard.press('ArrowUp');
}

/** @param {import('playwright-core').Page} page @param {string} word */
async function checkMarks(page, word) {
  const read = () => [...(CSS.highlights.get('search') ?? [])].map(String).join(' ').toLowerCase();
  await page
    .waitForFunction(() => CSS.highlights.get('search')?.size > 0, null, {timeout: 5000})
    .catch(() => {
      ensure(false, `${word}: nothing is marked`);
    });
  const marked = await page.evaluate(read);
  ensure(marked.includes(word), `${word}: marked is ${marked.slice(0, 80)}`);
}
