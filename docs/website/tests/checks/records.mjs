/** What the records prove: badges, counts, and outputs with machine and date, in the HTML of every page. */

import {readFileSync} from 'node:fs';
import {join} from 'node:path';
import {ensure} from '../browser.mjs';
import {elementsOf} from '../html.mjs';

export const records = {
  name: 'every badge, count and recorded output is that of the records',
  async run({url, pages, website, markdown}) {
    const read = async (address) => {
      const answer = await fetch(url + address, {headers: {'Accept-Encoding': 'identity'}});
      return answer.text();
    };
    const {proof} = JSON.parse(readFileSync(join(website, 'data', 'landing.json'), 'utf8'));
    const faults = [];
    for (const address of ['/', '/zh-Hans/'].filter((each) => pages.includes(each))) {
      faults.push(...faultsOfLanding(await read(address), proof).map((fault) => `${address}: ${fault}`));
    }
    const counts = {badges: 0, outputs: 0};
    for (const [address, text] of [...markdown].filter(([each]) => pages.includes(each))) {
      const {page} = JSON.parse(text.split('\n')[1]);
      counts.badges += page.badges.length;
      counts.outputs += Object.keys(page.recorded?.outputs ?? {}).length;
      faults.push(...faultsOfPage(await read(address), page).map((fault) => `${address}: ${fault}`));
    }
    ensure(faults.length === 0, faults.join('\n'));
    const said = Object.entries(proof.verified).map(([device, count]) => `${count} / ${proof.programs} on ${device}`);
    return [`${counts.badges} badges`, `${counts.outputs} recorded outputs`, ...said].join(', ');
  },
  spoils: [
    {replace: [/(badge-line"? data-state=)"?\w+"?/, '$1"x"'], expect: /the badges are x/},
    {replace: [/<strong>\d+<span/, '<strong>7<span'], expect: /the count is not/},
    {html: '<p class="output-run">x</p>', expect: /outputs are marked as recorded/},
  ],
};

/**
 * @param {string} html
 * @param {{programs: number, verified: Record<string, number>}} proof
 * @returns {string[]}
 */
export function faultsOfLanding(html, {programs, verified}) {
  const words = squeeze(elementsOf(html, 'proof').map((element) => element.words));
  const counts = Object.values(verified)
    .filter((count) => count > 0)
    .map((count) => `${count} / ${programs} `);
  const missing = counts.filter((count) => !words.includes(count));
  const isIdle = counts.length === 0 && words !== '';
  return [
    ...missing.map((count) => `the count is not ${count}: ${words}`),
    ...(isIdle ? [`nothing ran: ${words}`] : []),
  ];
}

/**
 * @param {string} html
 * @param {{badges: import('../../src/components/page/Badge.js').BadgeData[],
 *   recorded?: {date: string, machine: string, outputs: Record<string, string>}}} page
 * @returns {string[]}
 */
export function faultsOfPage(html, {badges, recorded}) {
  const shown = elementsOf(html, 'badge-line');
  const states = shown.map(({attributes}) => attributes['data-state']).join();
  const expected = badges.map(({state}) => state).join();
  const runs = elementsOf(html, 'output-run').map(({words}) => words);
  const outputs = elementsOf(html, 'output').map(({words}) => squeeze([words]));
  const texts = Object.values(recorded?.outputs ?? {});
  return [
    ...(states === expected ? [] : [`the badges are ${states}, not ${expected}`]),
    ...badges
      .flatMap((badge, index) =>
        [badge.date, badge.processor].filter((fact) => fact && !shown[index]?.words.includes(fact)),
      )
      .map((fact) => `the badge does not say ${fact}`),
    ...(runs.length === texts.length ? [] : [`${runs.length} outputs are marked as recorded, not ${texts.length}`]),
    ...runs
      .filter((words) => !words.includes(recorded?.date) || !words.includes(recorded?.machine))
      .map((words) => `an output is marked ${words}`),
    ...texts
      .filter((text) => !outputs.some((words) => words.includes(squeeze([text]))))
      .map((text) => `no output is ${text}`),
  ];
}

/** @param {string[]} parts How lines break is the layout's. */
const squeeze = (parts) => parts.join(' ').replace(/\s+/g, ' ').trim();
