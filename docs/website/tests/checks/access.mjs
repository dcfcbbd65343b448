/** Accessibility: the rules of WCAG 2 A and AA that axe can see, in light and dark, wide and narrow. */

import {readFileSync} from 'node:fs';
import {createRequire} from 'node:module';
import {DESKTOP, PHONE, ensure, open, visitAll} from '../browser.mjs';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const ALL_RULES = {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'], resultTypes: ['violations']};
/** The page of search results has none of the parts that pages of the documentation share: all must hold there. */
const EVERY_RULE = {resultTypes: ['violations']};
/** All that a mode changes are colours. */
const COLOUR_RULES = {
  runOnly: {type: 'rule', values: ['color-contrast', 'link-in-text-block']},
  resultTypes: ['violations'],
};
const PAGES = [
  '/',
  '/zh-Hans/',
  '/docs/basics/booster_api/',
  '/zh-Hans/docs/basics/booster_api/',
  '/docs/concepts/distributed_training/',
  '/docs/get_started/installation/',
  '/docs/api/collectives/',
  '/search/?q=optimizer',
  '/zh-Hans/search/?q=optimizer',
  '/versions/',
  '/features/',
  '/zh-Hans/models/',
  '/tutorials/',
  '/404.html',
];

export const access = {
  name: 'axe finds nothing against WCAG 2 A and AA, in light and dark, wide and narrow',
  async run(site) {
    const visits = PAGES.filter((address) => site.pages.includes(address.split('?')[0])).flatMap((address) => [
      {address, colorScheme: 'light', viewport: DESKTOP, rules: isSearch(address) ? EVERY_RULE : ALL_RULES},
      {address, colorScheme: 'dark', viewport: DESKTOP, rules: COLOUR_RULES},
      {address, colorScheme: 'dark', viewport: PHONE, rules: ALL_RULES},
    ]);
    await visitAll(site, visits, async (page, {address, colorScheme, viewport, rules}) => {
      await page.setViewportSize(viewport);
      await page.emulateMedia({colorScheme, reducedMotion: 'reduce'});
      await open(page, site.url + address);
      if (isSearch(address)) {
        await page.locator('main mark').first().waitFor();
      }
      await page.evaluate(AXE);
      const {violations} = await page.evaluate((chosen) => window.axe.run(document, chosen), rules);
      const found = violations.map(({id, nodes}) => `${id} (${colorScheme}, ${viewport.width}): ${examples(nodes)}`);
      ensure(found.length === 0, found.join('\n'));
    });
    return `${visits.length} visits`;
  },
  spoils: [
    {html: '<p style="color:#aaa;background:#fff">faint</p>', expect: /color-contrast/},
    {html: '<img src="/img/logo.svg">', expect: /image-alt/},
  ],
};

/** @param {string} address */
const isSearch = (address) => address.includes('/search/');

/** @param {{html: string}[]} nodes */
const examples = (nodes) =>
  nodes
    .slice(0, 3)
    .map(({html}) => html.slice(0, 160))
    .join(' | ');
