import assert from 'node:assert/strict';
import {test} from 'node:test';
import {representatives, templatesOf} from '../templates.mjs';

const DIAGRAM = '```mermaid\nflowchart LR\n```\n';
const PAGES = new Map([
  ['/', ''],
  ['/zh-Hans/', ''],
  ['/versions/', ''],
  ['/404.html', ''],
  ['/something/', ''],
  ['/docs/api/lib/', '{{ autodoc:lib.Box }}\n'],
  ['/docs/api/lib.nn/', '{{ autodoc:lib.nn.Box }}\n'],
  ['/docs/basics/a/', DIAGRAM],
  ['/docs/basics/b/', 'text'],
  ['/docs/basics/c/', `${DIAGRAM}\n> [!NOTE]\n> text\n`],
  ['/zh-Hans/docs/basics/b/', 'text'],
]);

test('a template is the kind of a page in a language, and what the page holds', () => {
  assert.deepEqual(templatesOf('/docs/basics/c/', PAGES.get('/docs/basics/c/')), [
    ' tutorial',
    ' tutorial with a diagram',
    ' tutorial with an alert',
  ]);
  assert.deepEqual(templatesOf('/zh-Hans/docs/next/api/lib/', ''), ['/zh-Hans module']);
  assert.deepEqual(templatesOf('/something/', ''), [' /something/']);
  const quoted = '````markdown\n<!--- tabs-start: a -->\n```mermaid\n```\n````\n';
  assert.deepEqual(templatesOf('/docs/basics/d/', quoted), [' tutorial']);
});

test('the representatives have every template, in every language, and few pages', () => {
  const chosen = representatives(PAGES);
  const templates = (addresses) => new Set(addresses.flatMap((address) => templatesOf(address, PAGES.get(address))));
  assert.equal(templates(chosen).size, templates([...PAGES.keys()]).size);
  assert.ok(chosen.includes('/docs/basics/c/') && !chosen.includes('/docs/basics/a/'));
  assert.equal(chosen.length, 8);
});

test('the representatives are the same in whatever order the pages come', () => {
  const reversed = new Map([...PAGES].reverse());
  assert.deepEqual(representatives(reversed), representatives(PAGES));
});
