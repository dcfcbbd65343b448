import assert from 'node:assert/strict';
import {readFileSync, readdirSync} from 'node:fs';
import {test} from 'node:test';

const ROOT = new URL('../../', import.meta.url);
const ID = /\bid(?:=|: )["'](site\.[\w.]+)["']/g;
const PLACEHOLDER = /\{\w+\}/g;
/** A message in quotes that belongs to the id before it: the argument of a call, or the child of a tag. */
const MESSAGE =
  /\bid(?:=|: )["'](site\.[\w.]+)["'](?:(?!\bid[=:]|<\/Translate>)[\s\S])*?(?:>\s*\{'|message:\s*')([^']*)'/g;

const source = readdirSync(new URL('src/', ROOT), {recursive: true})
  .filter((path) => path.endsWith('.js'))
  .map((path) => readFileSync(new URL(`src/${path}`, ROOT), 'utf8'))
  .join('\n');
const chinese = JSON.parse(readFileSync(new URL('i18n/zh-Hans/code.json', ROOT), 'utf8'));

test('every word of the site has a Chinese translation, and none is left over', () => {
  const used = new Set([...source.matchAll(ID)].map(([, id]) => id));
  const translated = new Set(Object.keys(chinese).filter((id) => id.startsWith('site.')));
  assert.ok(used.size > 50);
  assert.deepEqual(
    [...used].filter((id) => !translated.has(id)),
    [],
  );
  assert.deepEqual(
    [...translated].filter((id) => !used.has(id)),
    [],
  );
});

test('translations have the placeholders of their originals', () => {
  const messages = [...source.matchAll(MESSAGE)];
  assert.ok(messages.some(([, , message]) => message.includes('{')));
  for (const [, id, message] of messages) {
    assert.deepEqual(
      (chinese[id].message.match(PLACEHOLDER) ?? []).sort(),
      (message.match(PLACEHOLDER) ?? []).sort(),
      id,
    );
  }
});
