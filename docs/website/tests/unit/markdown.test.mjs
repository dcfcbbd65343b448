import assert from 'node:assert/strict';
import {after, test} from 'node:test';
import {wordsOf} from '../../plugins/markdown/tree.mjs';
import {find, findComponent, makeSite, prop, transform} from './site.mjs';

const site = makeSite({});
after(site.remove);

for (const kind of ['NOTE', 'TIP', 'IMPORTANT', 'WARNING', 'CAUTION']) {
  test(`an alert ${kind} becomes an admonition without its mark`, async () => {
    const tree = await transform(site, `> [!${kind}]\n> Mind the \`gap\`.\n>\n> - twice\n`);
    const box = find(tree, ({type}) => type === 'admonition');
    assert.equal(box.data.hProperties.type, kind.toLowerCase());
    assert.equal(wordsOf(box), 'Mind the gap.twice');
  });
}

test('a plain quote stays a quote', async () => {
  const tree = await transform(site, '> [!OTHER]\n> text\n\n> text\n');
  assert.deepEqual(
    tree.children.map(({type}) => type),
    ['blockquote', 'blockquote'],
  );
});

const TABS = '<!--- tabs-start: device -->\n\n**CPU**\n\none\n\n**GPU**\n\ntwo\n\n<!--- tabs-end -->\n\nafter\n';

test('tabs hold what stands below their titles, up to the end', async () => {
  const tree = await transform(site, TABS);
  const tabs = findComponent(tree, 'Tabs');
  assert.equal(prop(tabs, 'groupId'), 'device');
  assert.deepEqual(
    tabs.children.map((tab) => [prop(tab, 'label'), wordsOf(tab)]),
    [
      ['CPU', 'one'],
      ['GPU', 'two'],
    ],
  );
  assert.equal(wordsOf(tree.children.at(-1)), 'after');
});

test('tabs without an end, without a title or without any tab stop the build', async () => {
  await assert.rejects(
    transform(site, '<!--- tabs-start: a -->\n\n**T**\n\nx\n'),
    /box\.md:1: tabs-start has no tabs-end/,
  );
  await assert.rejects(
    transform(site, 'x\n\n<!--- tabs-start: a -->\n\nx\n\n<!--- tabs-end -->\n'),
    /box\.md:5: a tab opens with/,
  );
  await assert.rejects(
    transform(site, '<!--- tabs-start: a -->\n\n<!--- tabs-end -->\n'),
    /box\.md:1: tabs-start has no tab /,
  );
});

const REGION = [
  '<!--- doc-test-ignore-start: two machines -->',
  '```python\na\n```',
  '```text\nb\n```',
  '<!--- doc-test-ignore-end -->',
  '```python\nc\n```',
];

test('programs in an ignored region carry the reason, and nothing else does', async () => {
  const tree = await transform(site, REGION.join('\n\n'));
  assert.deepEqual(
    tree.children.map((node) => node.name ?? node.value),
    ['NotRun', 'b', 'c'],
  );
  assert.equal(prop(tree.children[0], 'reason'), 'two machines');
});

test('an ignored region without an end stops the build', async () => {
  const failing = transform(site, 'a\n\n<!--- doc-test-ignore-start: why -->\n\n```python\na\n```\n');
  await assert.rejects(failing, /box\.md:3: doc-test-ignore-start has no doc-test-ignore-end/);
});

test('an output is set apart from other text', async () => {
  const tree = await transform(site, '```text output exact\na\n```\n\n```text\nb\n```\n');
  assert.deepEqual(
    tree.children.map((node) => node.name ?? node.type),
    ['Output', 'code'],
  );
});

test('the command of the tests is shown, and other comments vanish', async () => {
  const tree = await transform(
    site,
    '<!-- secret -->\n\ntext <!-- hidden --> more\n\n<!-- doc-test-command: torchrun a.py -->\n',
  );
  assert.equal(prop(findComponent(tree, 'RunPage'), 'command'), 'torchrun a.py');
  assert.doesNotMatch(JSON.stringify(tree.children), /secret|hidden/);
});

test('comments that share a node with others or with HTML are read one by one', async () => {
  const tree = await transform(site, '<!-- one -->\n<!-- doc-test-command: python a.py -->\n');
  assert.equal(prop(findComponent(tree, 'RunPage'), 'command'), 'python a.py');
});

test('the state of the page stands below its title, and stale sections are marked', async () => {
  const tree = await transform(site, '# Title\n\n## Old `code`\n\nx\n\n## New\n', {page: {stale: ['Old code']}});
  assert.deepEqual(
    tree.children.map((node) => node.name ?? node.type),
    ['heading', 'PageStatus', 'heading', 'StaleSection', 'paragraph', 'heading'],
  );
});
