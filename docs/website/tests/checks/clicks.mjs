/** How far what a reader comes for is from the landing page, by the links in the HTML of the site. */

import {ensure} from '../browser.mjs';
import {outlineOf} from '../html.mjs';

const LIMIT = 2;
/** Landing pages, and below each what must be within reach: a page, or a place on one. */
const LANDINGS = ['/', '/zh-Hans/'];
const GOALS = {
  'a program that runs': 'docs/get_started/run_demo/',
  'the API of Booster.boost': 'docs/api/booster/#colossal.booster.Booster.boost',
  'resume a training': 'docs/basics/booster_checkpoint/',
  SLURM: 'docs/tutorials/several_nodes/',
  'choose a plugin': 'docs/basics/booster_plugins/',
  'serve a model': 'docs/advanced_tutorials/opt_service/',
};

export const clicks = {
  name: 'what readers come for is two clicks from the landing page, or one search',
  async run({url}) {
    const far = [];
    const said = new Map();
    for (const landing of LANDINGS) {
      const steps = await stepsFrom(landing, url);
      for (const [goal, place] of Object.entries(GOALS)) {
        const [path] = place.split('#');
        const {ok} = await fetch(url + landing + path);
        const near = ok ? Math.min(steps.get(landing + place) ?? Infinity, steps.get(landing + path) ?? Infinity) : Infinity;
        said.set(goal, Math.max(said.get(goal) ?? 0, near));
        if (near > LIMIT) {
          far.push(`${landing}: ${goal} (${place}) is more than ${LIMIT} clicks away`);
        }
      }
    }
    ensure(far.length === 0, far.join('\n'));
    return [...said].map(([goal, steps]) => `${goal}: ${steps}`).join(', ');
  },
  spoils: [{missing: /^\/(zh-Hans\/)?docs\/get_started\/run_demo\//, expect: /a program that runs .* is more than 2 clicks/}],
};

/**
 * The fewest clicks to all places that are within the limit.
 *
 * @param {string} landing
 * @param {string} url
 * @returns {Promise<Map<string, number>>} By path with anchor.
 */
async function stepsFrom(landing, url) {
  const steps = new Map([[landing, 0]]);
  let last = [landing];
  for (let step = 1; step <= LIMIT; step += 1) {
    const next = [];
    for (const address of last) {
      const answer = await fetch(url + address.split('#')[0]);
      for (const {tag, address: target} of outlineOf(answer.ok ? await answer.text() : '').links) {
        const there = new URL(target, url + address);
        const place = there.pathname + there.hash;
        if (tag === 'a' && there.origin === new URL(url).origin && !steps.has(place)) {
          steps.set(place, step);
          next.push(place);
        }
      }
    }
    last = next;
  }
  return steps;
}
