/** Anchors of documented objects. */

import {ensure, open, visitAll} from '../browser.mjs';
import {repeat} from '../spoil.mjs';

export const anchors = {
  name: 'every hook of every page is an anchor that the page scrolls to',
  async run(site) {
    const counts = [];
    await visitAll(site, site.hooked, async (page, {address, hooks}) => {
      // As a link from elsewhere leads here; then a jump within the page.
      await open(page, `${site.url}${address}#${hooks.at(-1)}`);
      // Diagrams are drawn last, and push down what stands below them.
      await page.waitForLoadState('networkidle');
      const shown = await page.locator('.api-object, .api-member').evaluateAll((all) => all.map(({id}) => id));
      const missing = hooks.filter((name) => !shown.includes(name));
      ensure(missing.length === 0, `no anchor for ${missing.join(', ')}`);
      const twice = shown.filter((name, index) => shown.indexOf(name) !== index);
      ensure(twice.length === 0, `twice on the page: ${twice.join(', ')}`);
      ensure(await page.evaluate(restsInView, hooks.at(-1)), `does not scroll to ${hooks.at(-1)}`);
      await page.evaluate(jump, hooks[0]);
      ensure(await page.evaluate(restsInView, hooks[0]), `does not scroll to ${hooks[0]}`);
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
 * Runs in the page: is this where the page comes to rest?
 *
 * @param {string} id
 */
async function restsInView(id) {
  const place = () => document.getElementById(id).getBoundingClientRect().top;
  let top = Number.NaN;
  for (let frames = 0; frames < 10; frames += 1) {
    if (place() !== top) {
      [top, frames] = [place(), 0];
    }
    await new Promise((resolve) => requestAnimationFrame(resolve));
  }
  return top >= 0 && top < window.innerHeight;
}

/**
 * Runs in the page.
 *
 * @param {string} id
 */
function jump(id) {
  window.location.hash = id;
}
