/** Anchors of documented objects. */

import {ensure, open, visitAll} from '../browser.mjs';
import {outlineOf} from '../html.mjs';

export const anchors = {
  name: 'every hook of every page is an anchor, once, and in its contents',
  async run({url, hooked}) {
    const counts = [];
    const faults = [];
    for (const {address, hooks} of hooked) {
      const answer = await fetch(url + address, {headers: {'Accept-Encoding': 'identity'}});
      const {objects, folded, contents} = outlineOf(await answer.text());
      const complain = (words, names) => names.length > 0 && faults.push(`${address}: ${words} ${names.join(', ')}`);
      complain(
        'no anchor for',
        hooks.filter((name) => !objects.includes(name)),
      );
      complain(
        'twice on the page:',
        objects.filter((name, index) => objects.indexOf(name) !== index),
      );
      complain(
        'not in the contents:',
        hooks.filter((name) => !contents.has(name) && !folded.has(name)),
      );
      counts.push(objects.length);
    }
    ensure(faults.length === 0, faults.join('\n'));
    ensure(counts.length > 0, 'no page has a hook');
    return `${counts.reduce((sum, count) => sum + count, 0)} anchors on ${counts.length} pages`;
  },
  spoils: [
    {replace: [/\bapi-object\b/g, 'x'], expect: /no anchor for/},
    {replace: [/<h\d [^>]*\bapi-object\b[^>]*>/, '$&$&'], expect: /twice on the page/},
    {replace: [/href="?#colossal/g, 'href=#x'], expect: /not in the contents/},
  ],
};

export const scrolling = {
  name: 'a page scrolls to its documented objects',
  async run(site) {
    const visits = site.hooked.filter(({address}) => site.opened.includes(address));
    await visitAll(site, visits, async (page, {address, hooks}) => {
      // As a link from elsewhere leads here; then a jump within the page.
      await open(page, `${site.url}${address}#${hooks.at(-1)}`);
      // Diagrams are drawn last, and push down what stands below them.
      await page.waitForLoadState('networkidle');
      ensure(await page.evaluate(restsInView, hooks.at(-1)), `does not scroll to ${hooks.at(-1)}`);
      await page.evaluate(jump, hooks[0]);
      ensure(await page.evaluate(restsInView, hooks[0]), `does not scroll to ${hooks[0]}`);
    });
    ensure(visits.length > 0, 'no page that was opened has a hook');
    return `${visits.length} pages`;
  },
  spoils: [{html: '<style>.api-object{position:fixed;top:-999px}</style>', expect: /does not scroll to/}],
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
