import assert from 'node:assert/strict';
import {test} from 'node:test';
import {collect} from '../../plugins/search/collect.mjs';
import {sectionsOf} from '../../plugins/search/sections.mjs';
import {prepare, search} from '../../src/search/engine.mjs';
import {excerptOf, partsOf} from '../../src/search/excerpt.mjs';
import {markerOf} from '../../src/search/query.mjs';

const SYNONYMS = [
  {say: ['oom', '显存不足'], means: 'Memory', page: 'memory'},
  {say: ['断点续训'], means: '容错'},
];
const MEMBER = '<h3 class="anchor api-member" id="lib.Box.open"><code>open</code></h3><p>Opens the lid.';

/** @param {string} title @param {string} body */
const article = (title, body) =>
  `<main><p>outside<div class="theme-doc-markdown markdown"><header><h1>${title}</h1></header>${body}</div>` +
  '<nav>outside</nav></main>';

/** @param {Record<string, [string, string]>} pages Title and body by path. */
const indexOf = (pages) =>
  prepare(
    collect(
      Object.entries(pages).map(([path, [title, body]]) => ({
        title,
        path,
        isReference: path.startsWith('api/'),
        html: article(title, body),
      })),
      SYNONYMS,
    ),
  );

/** @param {ReturnType<typeof indexOf>} index @param {string} query */
const pathsOf = (index, query) => search(index, query).map(({page}) => page.path);

test('a section has its heading, its words, and the names of its code that the words leave out', () => {
  const body =
    '<p>First <b>words</b>.<h2 id=more>More<a class="hash-link">#</a></h2><p>Call <code>run_all</code>.' +
    '<pre>run_all(deep_copy)\ndeep_copy</pre><button>Copy</button><span class="katex">x</span>';
  assert.deepEqual(sectionsOf(article('Title', body)), [
    {anchor: '', kind: 0, heading: 'Title', text: 'First words.', code: ''},
    {anchor: 'more', kind: 0, heading: 'More', text: 'Call run_all.', code: 'deep_copy'},
  ]);
});

test('a list of links, an object and a member are told from text', () => {
  const links = '<h2 id=next>Next</h2><ul><li><a href=a>A page</a>: on it<li><a href=b>Another</a></ul>';
  const object = `<h2 class="api-object" id="lib.Box"><code>Box</code></h2><p>A box. See <a href=c>here</a>.${MEMBER}`;
  assert.deepEqual(
    sectionsOf(article('T', links + object)).map(({anchor, kind}) => [anchor, kind]),
    [
      ['', 0],
      ['next', 3],
      ['lib.Box', 1],
      ['lib.Box.open', 2],
    ],
  );
});

test('an object that a tutorial shows too is found in the reference only', () => {
  const index = indexOf({lesson: ['Lesson', `<p>Words.${MEMBER}`], 'api/lib': ['Lib', MEMBER]});
  assert.deepEqual(pathsOf(index, 'Box.open'), ['api/lib']);
  assert.equal(search(index, 'box.open()')[0].sections[0].anchor, 'lib.Box.open');
});

test('a word is found in its forms and at the beginning of a longer one, never within one', () => {
  const index = indexOf({a: ['A', '<p>a room'], b: ['B', '<p>many boxes'], c: ['C', '<p>boxing gloves']});
  assert.deepEqual(pathsOf(index, 'oo'), []);
  assert.deepEqual(pathsOf(index, 'box').sort(), ['b', 'c']);
  assert.deepEqual(pathsOf(index, 'roo'), ['a']);
});

test('a title goes before a heading, a heading before words, words before code, and words before the reference', () => {
  const index = indexOf({
    code: ['One', '<p>nothing here<pre>lever</pre>'],
    text: ['Two', '<p>a lever here'],
    heading: ['Three', '<h2 id=h>Lever</h2><p>nothing here'],
    title: ['Lever', '<p>nothing here'],
    'api/lib': ['Four', '<p>a lever here'],
  });
  const paths = pathsOf(index, 'lever');
  assert.deepEqual(paths.slice(0, 3), ['title', 'heading', 'text']);
  assert.ok(paths.indexOf('text') < paths.indexOf('api/lib'));
  assert.equal(paths.at(-1), 'code');
});

test('a section that says all words goes before one that says one of them often', () => {
  const index = indexOf({often: ['A', '<p>red red red red'], all: ['B', '<p>a red wheel'], other: ['C', '<p>other']});
  assert.deepEqual(pathsOf(index, 'how to find the red wheel')[0], 'all');
});

test('a synonym finds the words that are meant, and leads to its page', () => {
  const index = indexOf({memory: ['Space', '<p>memory'], other: ['Memory', '<p>memory'], 容错: ['容错', '<p>训练']});
  assert.deepEqual(pathsOf(index, 'OOM'), ['memory', 'other']);
  assert.equal(pathsOf(index, '显存不足')[0], 'memory');
  assert.deepEqual(pathsOf(index, '断点续训'), ['容错']);
});

test('words that are joined in another way are the same', () => {
  const index = indexOf({a: ['A', '<p>multinode training'], b: ['B', '<p>other words']});
  assert.deepEqual(pathsOf(index, 'multi-node'), ['a']);
});

test('Chinese is found without spaces, whole before in parts', () => {
  const index = indexOf({whole: ['甲', '<p>使用梯度累积训练'], part: ['乙', '<p>梯度很大'], none: ['丙', '<p>其他']});
  assert.deepEqual(pathsOf(index, '如何使用梯度累积'), ['whole', 'part']);
});

test('a question without words finds nothing', () => {
  const index = indexOf({a: ['A', '<p>some words']});
  for (const query of ['', '  ', '?', '(((', '的', '\\']) {
    assert.deepEqual(pathsOf(index, query), [], query);
  }
});

test('the words of a question stand out, in the part of the text that has them', () => {
  const marker = markerOf('box');
  const text = `${'word '.repeat(60)}Boxes and inboxes ${'word '.repeat(60)}`;
  const excerpt = excerptOf(text, marker);
  assert.ok(excerpt.includes('Boxes') && excerpt.startsWith('… word') && excerpt.endsWith('…') && excerpt.length < 140);
  assert.deepEqual(
    partsOf('Boxes and inboxes', marker).map(({words, isFound}) => [words, isFound]),
    [
      ['Boxes', true],
      [' and inboxes', false],
    ],
  );
  assert.equal(markerOf('?'), null);
  assert.equal(excerptOf('Short.', null), 'Short.');
});
