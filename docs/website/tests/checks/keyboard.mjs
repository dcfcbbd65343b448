/** The site without a mouse. */

import {ensure, open, withPage} from '../browser.mjs';
import {repeat} from '../spoil.mjs';

const PAGE = '/docs/basics/booster_api/';
/** Presses of the tab key until something further down must have been reached. */
const FAR = 60;
/** Milliseconds after which menus have opened and the search has its index. */
const SETTLED = 500;

export const keyboard = {
  name: 'skip link, search, menus, sidebar and tabs can be used by keyboard',
  async run(site) {
    await withPage(site, async (page) => {
      await checkSkipLink(page, site.url + PAGE);
      await checkSearch(page, site.url + PAGE);
      await checkMenu(page, site.url + PAGE);
      await checkSidebar(page, site.url + PAGE);
    });
    return (await checkTabs(site)) ?? 'no page has tabs';
  },
  spoils: [
    {html: '<style>[class*=skipToContent]{display:none}</style>', expect: /first in line/},
    {html: repeat('document.querySelector(".navbar__search-input").tabIndex=-1'), expect: /the search is out of reach/},
    {
      html:
        '<script>addEventListener("focusout",({target})=>' +
        'target.matches(".navbar__search-input")&&setTimeout(()=>target.focus(),200))</script>',
      expect: /takes the focus back/,
    },
    {html: '<style>.dropdown__menu{display:none!important}</style>', expect: /Chinese is out of reach|stays hidden/},
    {html: '<style>.theme-doc-sidebar-menu{display:none}</style>', expect: /the sidebar is out of reach/},
  ],
};

/** @param {import('playwright-core').Page} page @param {string} address */
async function checkSkipLink(page, address) {
  await open(page, address);
  await page.keyboard.press('Tab');
  ensure((await focused(page)).includes('Skip to main content'), `first in line is ${await focused(page)}`);
  await page.keyboard.press('Enter');
  await page.keyboard.press('Tab');
  const isThere = await page.evaluate(() => document.activeElement.closest('main') !== null);
  ensure(isThere, 'the skip link does not lead to the text');
}

/** The search can be reached, and does not pull back who moves on. */
async function checkSearch(page, address) {
  await open(page, address);
  const loaded = page.waitForResponse((response) => response.url().includes('search-index'));
  // Who does not reach the search waits for nothing.
  loaded.catch(() => {});
  await reach(page, 'the search', () => document.activeElement.matches('.navbar__search-input'));
  await page.keyboard.press('Tab');
  const next = await page.evaluate(() => document.activeElement.outerHTML);
  await loaded;
  await page.waitForTimeout(SETTLED);
  ensure((await page.evaluate(() => document.activeElement.outerHTML)) === next, 'the search takes the focus back');
}

/** @param {import('playwright-core').Page} page @param {string} address */
async function checkMenu(page, address) {
  await open(page, address);
  await reach(page, 'the language menu', () => document.activeElement.matches('.dropdown > .navbar__link[href="#"]'));
  await page.keyboard.press('Enter');
  await page.waitForTimeout(SETTLED);
  await reach(page, 'Chinese', () => document.activeElement.textContent === '简体中文');
  const isVisible = await page.evaluate(() => document.activeElement.checkVisibility({visibilityProperty: true}));
  ensure(isVisible, 'the menu stays hidden');
}

/** @param {import('playwright-core').Page} page @param {string} address */
async function checkSidebar(page, address) {
  await open(page, address);
  await reach(page, 'the sidebar', () => document.activeElement.matches('.theme-doc-sidebar-menu .menu__link'));
  const isOpen = () => page.evaluate(() => document.activeElement.getAttribute('aria-expanded'));
  const before = await isOpen();
  await page.keyboard.press('Enter');
  await page.waitForTimeout(SETTLED);
  ensure(before !== (await isOpen()), 'a category does not fold');
}

/** @param {import('playwright-core').Page} page */
const focused = (page) => page.evaluate(() => document.activeElement.textContent.trim().slice(0, 60));

/**
 * @param {import('playwright-core').Page} page
 * @param {string} what
 * @param {() => boolean} isThere
 */
async function reach(page, what, isThere) {
  for (let presses = 0; presses < FAR; presses += 1) {
    await page.keyboard.press('Tab');
    if (await page.evaluate(isThere)) {
      return;
    }
  }
  ensure(false, `${what} is out of reach`);
}

/** The tabs of the first page that has some. */
async function checkTabs(site) {
  const address = site.withTabs[0];
  if (!address) {
    return null;
  }
  await withPage(site, async (page) => {
    await open(page, site.url + address);
    const tabs = page.locator('[role=tablist]').first().locator('[role=tab]');
    await tabs.first().focus();
    await page.keyboard.press('ArrowRight');
    await page.keyboard.press('Enter');
    ensure(
      (await tabs.nth(1).getAttribute('aria-selected')) === 'true',
      'the arrow key does not lead to the second tab',
    );
    const panels = page.locator('.tabs-container').first().locator('[role=tabpanel]');
    ensure((await panels.nth(1).isVisible()) && !(await panels.first().isVisible()), 'the second tab does not open');
  });
  return `tabs on ${address}`;
}
