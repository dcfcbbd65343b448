/** How much JavaScript a first visit costs. */

import {ensure, open, withPage} from '../browser.mjs';

/** Bytes over the wire, compressed, before the reader does anything. */
const BUDGET = 400 * 1024;
const PAGES = ['/', '/zh-Hans/', '/docs/basics/booster_api/', '/docs/api/lr_schedules/'];

export const budget = {
  name: 'a first visit loads less than 400 kB of compressed JavaScript',
  async run(site) {
    const sizes = [];
    for (const address of PAGES.filter((each) => site.pages.includes(each))) {
      const bytes = await withPage(site, (page) => measure(page, site.url + address));
      ensure(bytes < BUDGET, `${address} loads ${Math.round(bytes / 1024)} kB of JavaScript`);
      sizes.push(`${address} ${Math.round(bytes / 1024)} kB`);
    }
    return sizes.join(', ');
  },
  spoils: [{html: '<script src="/ballast.js"></script>', ballast: 2 * BUDGET, expect: /kB of JavaScript/}],
};

/**
 * @param {import('playwright-core').Page} page
 * @param {string} address
 */
async function measure(page, address) {
  const scripts = [];
  page.on('requestfinished', (request) => request.resourceType() === 'script' && scripts.push(request));
  await open(page, address);
  await page.waitForLoadState('networkidle');
  const sizes = await Promise.all(scripts.map((request) => request.sizes()));
  return sizes.reduce((sum, {responseBodySize}) => sum + responseBodySize, 0);
}
