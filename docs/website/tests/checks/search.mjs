/** The search in the browser, without any server. */

import {ensure, open, withPage} from '../browser.mjs';

const QUERIES = [
  ['/docs/get_started/installation/', 'optimizer', '/docs/'],
  ['/zh-Hans/docs/get_started/installation/', '显存', '/zh-Hans/docs/'],
];

export const search = {
  name: 'the search finds English and Chinese words, and the page found marks them',
  async run(site) {
    for (const [address, word, prefix] of QUERIES) {
      await withPage(site, async (page) => {
        await open(page, site.url + address);
        await page.locator('.navbar__search-input').click();
        await page.keyboard.type(word);
        const hit = page.locator('[class*=dropdownMenu] [class*=suggestion] mark').first();
        await hit.waitFor({timeout: 10000}).catch(() => ensure(false, `${word}: found nothing`));
        await page.keyboard.press('Enter');
        await page.waitForURL((url) => url.pathname.startsWith(prefix) && url.searchParams.has('_highlight'), {
          timeout: 5000,
        });
        const marks = page.locator('article mark');
        await marks
          .first()
          .waitFor({timeout: 5000})
          .catch(() => ensure(false, `${word}: nothing is marked`));
        const marked = (await marks.allInnerTexts()).join(' ').toLowerCase();
        ensure(marked.includes(word), `${word}: marked is ${marked.slice(0, 80)}`);
        await open(page, `${site.url}${prefix.replace('docs/', 'search/')}?q=${encodeURIComponent(word)}`);
        await page.locator('main mark, section mark, article mark').first().waitFor({timeout: 10000});
      });
    }
    return QUERIES.map(([, word]) => word).join(', ');
  },
  spoils: [
    {html: '<style>article mark{display:none}</style>', expect: /nothing is marked/},
    {missing: /search-index/, expect: /found nothing/},
  ],
};
