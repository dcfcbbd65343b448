import assert from 'node:assert/strict';
import {after, test} from 'node:test';
import {faultsOfLanding, faultsOfPage} from '../checks/records.mjs';
import {find, findComponent, makeSite, prop, transform} from './site.mjs';

const site = makeSite({});
after(site.remove);

const PAGE = '# Title\n\n```text output\nloss ...\n```\n\n```text output\nloss 1\n```\n';
const LINE = PAGE.split('\n').indexOf('```text output') + 4;
const recorded = {date: '2026-01-01', machine: 'A processor', outputs: {[LINE]: 'loss 0.25'}};

test("an output that the author left open is the recorded one, and any other is the author's", async () => {
  const tree = await transform(site, PAGE, {page: {recorded}});
  const outputs = tree.children.filter(({name}) => name === 'Output');
  assert.deepEqual(
    outputs.map((output) => [prop(output, 'kind'), output.children[0].value]),
    [
      ['recorded', 'loss 0.25'],
      [undefined, 'loss 1'],
    ],
  );
});

test("without a record every output is the author's", async () => {
  const tree = await transform(site, PAGE);
  assert.equal(prop(findComponent(tree, 'Output'), 'kind'), undefined);
  assert.equal(find(tree, ({type}) => type === 'code').value, 'loss ...');
});

const BADGES = [{device: 'cpu', state: 'verified', date: '2026-01-01', processor: 'A processor'}];
const BADGE = '<li><span class="badge-line" data-state="verified">CPU 2026-01-01 A processor</span></li>';
const RUN = '<span class="output-run">2026-01-01, <!-- -->A processor</span>';
const OUTPUT = `<div class="output"><p>Output${RUN}</p><pre>loss<br><b>0.25</b></pre></div>`;

test('a page shows what its record says', () => {
  assert.deepEqual(faultsOfPage(`<p>x</p>${BADGE}${OUTPUT}`, {badges: BADGES, recorded}), []);
  assert.deepEqual(faultsOfPage('<p>x</p>', {badges: []}), []);
});

for (const [html, page, fault] of [
  [BADGE, {badges: []}, 'the badges are verified, not '],
  ['', {badges: BADGES}, 'the badges are , not verified'],
  [BADGE.replace('A proc', 'X'), {badges: BADGES}, 'the badge does not say A processor'],
  [OUTPUT, {badges: []}, '1 outputs are marked as recorded, not 0'],
  [OUTPUT.replace(RUN, ''), {badges: [], recorded}, '0 outputs are marked as recorded, not 1'],
  [OUTPUT.replace('A proc', 'X'), {badges: [], recorded}, 'an output is marked 2026-01-01, Xessor'],
  [OUTPUT.replace('0.25', '...'), {badges: [], recorded}, 'no output is loss 0.25'],
]) {
  test(`another page is a fault: ${fault}`, () => {
    assert.ok(faultsOfPage(html, page).includes(fault), faultsOfPage(html, page).join());
  });
}

test('the landing page says the counts of the records, and without records nothing', () => {
  const html = '<section class="proof"><b>5<i> / <!-- -->6</i></b> verified on a CPU</section>';
  assert.deepEqual(faultsOfLanding(html, {programs: 6, verified: {cpu: 5}}), []);
  assert.deepEqual(faultsOfLanding('<p>x</p>', {programs: 6, verified: {}}), []);
  assert.match(faultsOfLanding(html, {programs: 6, verified: {cpu: 6}})[0], /the count is not 6 \/ 6/);
  assert.match(faultsOfLanding(html, {programs: 6, verified: {}})[0], /nothing ran/);
  assert.match(faultsOfLanding(html, {programs: 6, verified: {cpu: 0}})[0], /nothing ran/);
});
