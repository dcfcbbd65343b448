/** Anchors of documented objects. */

import {ensure, open, visitAll} from '../browser.mjs';
import {repeat} from '../spoil.mjs';

/** Anchors of a page to jump to: every jump draws the whole page. */
const JUMPS = 4;

export const anchors = {
  name: 'every hook of every page is an anchor that the page scrolls to',
  async run(site) {
    const counts = [];
    await visitAll(site, site.hooked, async (page, {address, hooks}) => {
      await open(page, site.url + address);
      const shown = await page.locator('.api-object, .api-member').evaluateAll((all) => all.map(({id}) => id));
      const missing = hooks.filter((name) => !shown.includes(name));
      ensure(missing.length === 0, `no anchor for ${missing.join(', ')}`);
      const twice = shown.filter((name, index) => shown.indexOf(name) !== index);
      ensure(twice.length === 0, `twice on the page: ${twice.join(', ')}`);
      const some = shown.filter((_, index) => index % Math.ceil(shown.length / JUMPS) === 0);
      const astray = await page.evaluate(scrollToEach, some);
      ensure(astray.length === 0, `does not scroll to ${astray.join(', ')}`);
      const linked = await page.locator('.theme-doc-toc-desktop a').evaluateAll((all) => all.map(({hash}) => hash));
      const unlisted = hooks.filter((name) => !linked.includes(`#${name}`));
      ensure(unlisted.length === 0, `not in the contents: ${unlisted.join(', ')}`);
      counts.push(shown.length);
    });
    ensure(counts.length > 0, 'no page has a hook');
    return `${counts.reduce((sum, count) => sum + count, 0)} anchors on ${counts.length} pages`;
  },
  spoils: [
    {html: repeat('document.querySelector(".api-object").id = "x"'), expect: /no anchor for/},
    {
      html: repeat(
        'window.spoilt ??= document.body.append(document.querySelector(".api-object").cloneNode(true)) ?? 1',
      ),
      expect: /twice on the page/,
    },
    {html: '<style>.api-object{position:fixed;top:-999px}</style>', expect: /does not scroll to/},
    {
      html: repeat('document.querySelector(".theme-doc-toc-desktop a[href*=colossal]").href = "#x"'),
      expect: /not in the contents/,
    },
  ],
};

/**
 * Runs in the page: which of these anchors are out of sight after a jump to them.
 *
 * @param {string[]} names
 */
async function scrollToEach(names) {
  const astray = [];
  for (const name of names) {
    window.scrollTo(0, 0);
    window.location.hash = name;
    await new Promise((resolve) => requestAnimationFrame(resolve));
    const {top} = document.getElementById(name).getBoundingClientRect();
    if (top < 0 || top > window.innerHeight - 10) {
      astray.push(name);
    }
  }
  return astray;
}
