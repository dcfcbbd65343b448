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

test('a page without a program shows no command', async () => {
  const tree = await transform(site, 'text\n\n<!-- doc-test-command: none -->\n');
  assert.equal(findComponent(tree, 'RunPage'), undefined);
  assert.doesNotMatch(JSON.stringify(tree.children), /none/);
});

const ABOUT = {kind: 'how-to', outcome: 'Train with `boost` in 5 lines.', minutes: 5, devices: ['cpu']};

test('the outcome leads the page, with its code', async () => {
  const tree = await transform(site, '\n\n# Title\n\nx\n', {page: {about: ABOUT}});
  assert.deepEqual(
    tree.children.map((node) => node.name ?? node.type),
    ['heading', 'paragraph', 'PageStatus', 'paragraph'],
  );
  const [, lead] = tree.children;
  assert.equal(lead.data.hProperties.className, 'lead');
  assert.deepEqual(
    lead.children.map(({type, value}) => [type, value]),
    [
      ['text', 'Train with '],
      ['inlineCode', 'boost'],
      ['text', ' in 5 lines.'],
    ],
  );
});

const CHECK = '```python check\na\n```\n\n```text output\nA\n```\n';
const OTHER = '```python check\nb\n```\n';
const FIGURE = '```python figure\nc\n```\n\n```text output\nC\n```\n\n```text output\nnot of the figure\n```\n';

test('checks and figures are folded with what they print, and neighboring checks share a fold', async () => {
  const usage = '```python\nx\n```\n\n```text output\nX\n```\n';
  const tree = await transform(site, [usage, CHECK, OTHER, FIGURE, 'words\n', OTHER, usage].join('\n'));
  const folds = tree.children.filter(({name}) => name === 'Fold');
  assert.deepEqual(
    tree.children.map((node) => node.name ?? node.value ?? node.type),
    ['x', 'Output', 'Fold', 'Fold', 'Output', 'paragraph', 'Fold', 'x', 'Output'],
  );
  assert.deepEqual(
    folds.map((fold) => [prop(fold, 'role'), wordsOf(fold)]),
    [
      ['check', 'aAb'],
      ['figure', 'cC'],
      ['check', 'b'],
    ],
  );
  assert.equal(folds[0].children[0].meta, null);
});

test('a check that is not run, or of another language, is not folded', async () => {
  const ignored = `<!--- doc-test-ignore-start: why -->\n\n${OTHER}\n<!--- doc-test-ignore-end -->\n`;
  const tree = await transform(site, `${ignored}\n\`\`\`text check\na\n\`\`\`\n`);
  assert.deepEqual(
    tree.children.map((node) => node.name ?? node.type),
    ['NotRun', 'code'],
  );
});

test('checks inside a list and inside tabs are folded where they stand', async () => {
  const item = await transform(site, `- item\n\n  ${CHECK.replaceAll('\n', '\n  ')}`);
  assert.equal(wordsOf(findComponent(item, 'Fold')), 'aA');
  const tabs = await transform(site, TABS.replace('one', CHECK));
  assert.equal(wordsOf(findComponent(findComponent(tabs, 'TabItem'), 'Fold')), 'aA');
});

test('code that is written to a file bears its name, and a transcript keeps its output', async () => {
  const tree = await transform(
    site,
    '```python file=a/train.py\nx\n```\n\n```shell run\nls\n```\n\n```text output\ny\n```\n',
  );
  assert.deepEqual(
    tree.children.map((node) => node.name ?? `${node.lang} ${node.meta}`),
    ['python title="a/train.py"', 'shell run', 'Output'],
  );
});

test('headings have the ids of the front matter, and links lead to them', async () => {
  const page = {
    headings: {4: 'title', 6: 'more', 8: 'more-1'},
    links: {'#更多': '#more', 'x.md#另一节': 'x.md#another', '#100%': '#all'},
  };
  const tree = await transform(
    site,
    '# 题\n\n## 更多\n\n## 更多\n\n[a](#更多), [b](x.md#%E5%8F%A6%E4%B8%80%E8%8A%82), [c][d], [e](#100%)\n\n[d]: #更多\n\n## 新\n',
    {page},
  );
  const headings = tree.children.filter(({type}) => type === 'heading');
  assert.deepEqual(
    headings.map((heading) => heading.data?.hProperties.id),
    ['title', 'more', 'more-1', undefined],
  );
  const links = tree.children.flatMap((node) => node.children ?? []).filter(({type}) => type === 'link');
  assert.deepEqual(
    [...links, find(tree, ({type}) => type === 'definition')].map(({url}) => url),
    ['#more', 'x.md#another', '#all', '#more'],
  );
});
