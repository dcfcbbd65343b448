import assert from 'node:assert/strict';
import {after, test} from 'node:test';
import {wordsOf} from '../../plugins/markdown/tree.mjs';
import {apiObject, find, findComponent, makeSite, paragraph, prop, transform} from './site.mjs';

const link = (url, words) => ({type: 'link', url, children: [{type: 'inlineCode', value: words}]});
const argument = (name, rest) => ({name, kind: 'positional_or_keyword', type: null, default: null, ...rest});

const BOX = apiObject('lib.Box', 'class', {
  signature: [argument('lid', {type: 'Lid | None', default: 'None'})],
  body: [paragraph('See ', link('api:lib.Lid', 'Lid'), ' and ', link('api:lib.hidden', 'hidden'), '.')],
  params: [{name: 'lid', type: 'Lid | None', default: 'None', body: [paragraph('What closes it.')]}],
  raises: [{type: 'Broken', body: [paragraph('It broke.')]}],
  examples: ['>>> box = Box()\n>>> box\nBox()'],
  members: ['lib.Box.open', 'lib.Box.close'],
});
const OBJECTS = [
  BOX,
  apiObject('lib.Box.open', 'method', {
    signature: ['a', 'b', 'c'].map((name) => argument(`a_rather_long_argument_${name}`, {type: 'str'})),
    return_type: 'Lid',
    body: [paragraph('Open it.')],
  }),
  apiObject('lib.Box.close', 'method', {signature: []}),
  apiObject('lib.Lid', 'class'),
  apiObject('lib.Broken', 'exception'),
  apiObject('lib.hidden', 'function', {body: [{type: 'math', value: 'x^2'}]}),
];
const REFERENCE = '{{ autodoc:lib.Lid }}\n\n{{ autodoc:lib.Broken }}\n';
const site = makeSite({
  objects: OBJECTS,
  pages: {'docs/api/lib.md': REFERENCE, 'docs/basics/a.md': '{{ autodoc:lib.Lid }}'},
});
after(site.remove);

/** @param {object} tree */
const headings = (tree) => tree.children.filter(({type}) => type === 'heading');

test('a hook becomes a heading with the path as its anchor, below the section that it stands in', async () => {
  const [title, box] = headings(await transform(site, '# Page\n\n## Section\n\n{{ autodoc:lib.Box }}\n')).slice(1);
  assert.equal(title.depth, 2);
  assert.equal(box.depth, 3);
  assert.equal(wordsOf(box), 'Box');
  box.data.id = 'stripped';
  box.data.hProperties.id = 'stripped';
  assert.equal(box.data.id, 'lib.Box');
  assert.equal(structuredClone({...box.data.hProperties}).id, 'lib.Box');
});

test('a tutorial folds what its hooks become, and keeps it out of its table of contents', async () => {
  const about = (kind) => ({page: {about: {kind, outcome: 'Do it', minutes: 1, devices: ['cpu']}}});
  const fold = (kind) => transform(site, '# Page\n\n## API\n\n{{ autodoc:lib.Box }}\n', about(kind));
  for (const kind of ['tutorial', 'how-to']) {
    const [box] = (await fold(kind)).children.filter(({name}) => name === 'Fold');
    assert.deepEqual(
      box.attributes.map(({value}) => value),
      ['api', 'Box'],
    );
    assert.ok(headings(box).length > 0);
    assert.ok(headings(box).every(({depth}) => depth > 3));
  }
  assert.ok((await fold('concept')).children.every(({name}) => name !== 'Fold'));
});

test('members follow their class, and those with a hook of their own stand there instead', async () => {
  const tree = await transform(site, '{{ autodoc:lib.Box }}\n\n{{ autodoc:lib.Box.open }}\n');
  assert.deepEqual(
    headings(tree).map((heading) => [heading.data.id, heading.depth]),
    [
      ['lib.Box', 2],
      ['lib.Box.close', 3],
      ['lib.Box.open', 3],
    ],
  );
});

test('the signature of a method has a line for each argument, when they are many', async () => {
  const tree = await transform(site, '{{ autodoc:lib.Box.open }}\n');
  const line = '    a_rather_long_argument';
  assert.equal(
    wordsOf(findComponent(tree, 'ApiSignature')),
    `lib.Box.open(\n${line}_a: str,\n${line}_b: str,\n${line}_c: str,\n) -> Lid`,
  );
});

test('types link to the reference rather than to a tutorial, and to the page itself', async () => {
  const tree = await transform(site, '{{ autodoc:lib.Box }}\n');
  const address = (words) => find(tree, (node) => node.type === 'link' && wordsOf(node) === words)?.url;
  assert.equal(address('Lid'), '../api/lib.md#lib.Lid');
  assert.equal(address('Broken'), '../api/lib.md#lib.Broken');
  assert.equal(address('open'), '#lib.Box.open');
});

test('a link to an object that no page shows leaves its words only', async () => {
  const tree = await transform(site, '{{ autodoc:lib.Box }}\n');
  assert.equal(
    find(tree, (node) => node.type === 'link' && wordsOf(node) === 'hidden'),
    undefined,
  );
  assert.match(wordsOf(findComponent(tree, 'ApiEntry')), /See Lid and hidden\./);
});

test('an entry has parameters, exceptions, the example as code and output, and the address of its code', async () => {
  const entry = findComponent(await transform(site, '{{ autodoc:lib.Box }}\n'), 'ApiEntry');
  const parts = entry.children.filter(({name}) => name === 'ApiPart').map((part) => prop(part, 'label'));
  assert.deepEqual(parts, ['parameters', 'raises', 'example', 'members']);
  assert.equal(prop(entry, 'code'), 'https://host/repo/blob/main/src/lib/box.py#L3-L9');
  assert.equal(find(entry, ({type, lang}) => type === 'code' && lang === 'python').value, 'box = Box()\nbox');
  assert.equal(find(findComponent(entry, 'Output'), ({type}) => type === 'code').value, 'Box()');
  assert.equal(wordsOf(findComponent(entry, 'ApiDefault')), 'None');
});

test('formulas of docstrings are set like those of pages', async () => {
  const formula = find(await transform(site, '{{ autodoc:lib.hidden }}\n'), ({type}) => type === 'math');
  assert.deepEqual(formula.data.hChildren[0].properties.className, ['language-math', 'math-display']);
});

test('a hook in a fence or within a line stays as it is', async () => {
  const tree = await transform(site, '```\n{{ autodoc:lib.Box }}\n```\n\nWrite {{ autodoc:lib.Box }} here.\n');
  assert.equal(findComponent(tree, 'ApiEntry'), undefined);
});

test('an unknown name stops the build with the line of the author', async () => {
  const failing = transform(site, '# Page\n\nText.\n\n{{ autodoc:lib.Bux }}\n');
  await assert.rejects(
    failing,
    /docs\/source\/en\/basics\/box\.md:5: autodoc knows no object lib\.Bux.*such as lib\.Box/,
  );
});

test('a name that is hooked twice stops the build', async () => {
  const failing = transform(site, '{{ autodoc:lib.Lid }}\n\n{{ autodoc:lib.Lid }}\n');
  await assert.rejects(failing, /box\.md:3: autodoc: lib\.Lid stands on this page already/);
});

test('a docstring that links to nothing stops the build', async () => {
  const dead = apiObject('lib.dead', 'function', {body: [paragraph(link('api:lib.gone', 'gone'))]});
  const broken = makeSite({objects: [dead]});
  await assert.rejects(
    transform(broken, '{{ autodoc:lib.dead }}\n'),
    /box\.md:1: .*lib\.gone, which is not documented/,
  );
  broken.remove();
});

test('in the reference a second name leads to the first; a tutorial shows the documentation', async () => {
  const first = apiObject('lib.deep.Box', 'class', {members: ['lib.deep.Box.open']});
  const second = {...first, name: 'lib.Box', alias_of: 'lib.deep.Box'};
  const two = makeSite({
    objects: [first, second, apiObject('lib.deep.Box.open', 'method')],
    pages: {'docs/api/lib.deep.md': '{{ autodoc:lib.deep.Box }}'},
  });
  const reference = await transform(two, '{{ autodoc:lib.Box }}\n', {path: 'docs/api/lib.md', page: {kind: 'api'}});
  assert.equal(
    find(findComponent(reference, 'ApiAlias'), ({type}) => type === 'link').url,
    './lib.deep.md#lib.deep.Box',
  );
  assert.deepEqual(
    headings(reference).map(({data}) => data.id),
    ['lib.Box'],
  );
  const tutorial = await transform(two, '{{ autodoc:lib.Box }}\n\n{{ autodoc:lib.deep.Box }}\n');
  assert.deepEqual(
    headings(tutorial).map(({data}) => data.id),
    ['lib.Box', 'lib.deep.Box.open', 'lib.deep.Box'],
  );
  two.remove();
});

test('a page of a release uses the objects and the code of that release', async () => {
  const path = 'versioned_docs/version-0.1.0/basics/box.md';
  const entry = findComponent(await transform(site, '{{ autodoc:lib.Lid }}\n', {path}), 'ApiEntry');
  assert.equal(prop(entry, 'code'), 'https://host/repo/blob/v0.1.0/src/lib/box.py#L3-L9');
});

test('without a repository no object leads to its code', async () => {
  const entry = findComponent(await transform(site, '{{ autodoc:lib.Lid }}\n', {repository: ''}), 'ApiEntry');
  assert.equal(prop(entry, 'code'), undefined);
  assert.ok(prop(entry, 'source').startsWith('src/lib/box.py'));
});
