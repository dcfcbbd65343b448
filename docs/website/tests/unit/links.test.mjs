import assert from 'node:assert/strict';
import {readFileSync} from 'node:fs';
import {fileURLToPath} from 'node:url';
import {test} from 'node:test';
import {findDeadLinks} from '../checks/links.mjs';
import {Repository} from '../repository.mjs';

const ROOT = fileURLToPath(new URL('../../../..', import.meta.url));

const FILES = {
  '/': '<link rel=stylesheet href=/assets/a.css><a href=docs/one/#part>one</a><script src=/assets/a.js></script>',
  '/docs/one/': '<link rel=canonical href=https://host/docs/one/><h2 id=part>x</h2><a href="#part">y</a>',
  '/docs/two/': '<h2 id="第二节">x</h2><a href="#%E7%AC%AC%E4%BA%8C%E8%8A%82">y</a><a download href=/d/x.py>z</a>',
  '/assets/a.css': '@font-face{src:url(a.woff2)}.x{background:url("data:image/png;base64,AA")}',
  '/assets/a.js': '',
  '/assets/a.woff2': '',
  '/d/x.py': '',
};
const PAGES = ['/', '/docs/one/', '/docs/two/'];

/**
 * @param {Record<string, string | null>} changed What differs from a site without a fault.
 * @param {string} repository
 */
const check = (changed = {}, repository = '') =>
  findDeadLinks(PAGES, async (path) => ({...FILES, ...changed})[path] ?? null, new Repository(repository, ROOT));

test('a site whose links all lead somewhere has no fault, and its links are counted', async () => {
  assert.deepEqual(await check(), {faults: [], counts: {links: 7, anchors: 3, files: 4, downloads: 1, repository: 0}});
});

const FAULTS = {
  'a dead link': ['<a href=../three/>x</a>', '/docs/one/ links to /docs/three/, and there is nothing'],
  'a dead anchor': ['<a href=/docs/two/#no>x</a>', 'links to /docs/two/#no, and there is no such anchor'],
  'a dead anchor of the page itself': ['<a href=#no>x</a>', 'links to /docs/one/#no, and there is no such anchor'],
  'a missing picture': ['<img src=/img/gone.svg>', 'links to /img/gone.svg, and there is nothing'],
  'a missing picture for fine screens': ['<img srcset="/img/gone.svg 2x">', 'links to /img/gone.svg'],
  'a missing script': ['<script src=/assets/gone.js></script>', 'links to /assets/gone.js'],
  'a missing download': ['<a download href=/d/gone.ipynb>x</a>', 'links to /d/gone.ipynb'],
  'a translation that is missing': ['<link rel=alternate href=https://host/zh-Hans/docs/one/>', '/zh-Hans/docs/one/'],
  'a picture from elsewhere': ['<img src=https://elsewhere.org/x.png>', 'loads https://elsewhere.org/x.png from else'],
  'a style from elsewhere': ['<link rel=stylesheet href=//elsewhere.org/x.css>', 'loads //elsewhere.org/x.css from'],
};

for (const [name, [html, expected]] of Object.entries(FAULTS)) {
  test(`${name} is found, and its page is named`, async () => {
    const {faults} = await check({'/docs/one/': FILES['/docs/one/'] + html});
    assert.equal(faults.length, 1);
    assert.ok(faults[0].startsWith('/docs/one/ ') && faults[0].includes(expected), faults[0]);
  });
}

test('a file that only a style sheet loads is missed, and so is what many pages link', async () => {
  assert.deepEqual((await check({'/assets/a.woff2': null})).faults, [
    '/assets/a.css links to /assets/a.woff2, and there is nothing',
  ]);
  const linking = Object.fromEntries(PAGES.map((path) => [path, '<a href=/gone/>x</a>']));
  assert.deepEqual((await check(linking)).faults, [`${PAGES.join(', ')} links to /gone/, and there is nothing`]);
});

test('links to other sites and pictures in the page itself are no faults', async () => {
  const html = '<a href=https://elsewhere.org/>x</a><a href=mailto:a@b.org>y</a><img src="data:image/png;base64,AA">';
  assert.deepEqual((await check({'/docs/one/': `<h2 id=part>x</h2>${html}`})).faults, []);
});

const HERE = 'https://host.example/team/lib';
const FILE = 'docs/website/tests/unit/links.test.mjs';
const LINES = readFileSync(new URL(import.meta.url), 'utf8').split('\n').length;

test('links into the repository lead to files that are here, and to lines that they have', async () => {
  const links = [`edit/main/${FILE}`, `blob/main/${FILE}#L1-L${LINES}`, 'blob/v0.1.0/src/gone.py#L1-L2'];
  const html = links.map((link) => `<a href="${HERE}/${link}">x</a>`).join('');
  const found = await check({'/docs/one/': FILES['/docs/one/'] + html}, HERE);
  assert.deepEqual([found.faults, found.counts.repository], [[], 3]);
});

for (const [link, expected, repository] of [
  [`${HERE}/edit/main/docs/gone.md`, 'there is no such file', HERE],
  [`${HERE}/blob/main/${FILE}#L1-L${LINES + 1}`, `that file has ${LINES} lines`, HERE],
  [`https://elsewhere.example/x/edit/main/${FILE}`, `the repository is ${HERE}`, HERE],
  [`${HERE}/edit/main/${FILE}`, 'pyproject.toml names no repository', ''],
]) {
  test(`a link into the repository is a fault: ${expected}`, async () => {
    const {faults} = await check({'/docs/one/': `${FILES['/docs/one/']}<a href="${link}">x</a>`}, repository);
    assert.equal(faults.length, 1);
    assert.ok(faults[0].endsWith(`links to ${link}, and ${expected}`), faults[0]);
  });
}
