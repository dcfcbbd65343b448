/** Hooks `{{ autodoc:path }}`, alone in a paragraph, become the documentation of the object. */

import {SKIP, visit} from 'unist-util-visit';
import {component} from '../markdown/tree.mjs';
import {ApiWriter} from './writer.mjs';

const HOOK = /^\{\{\s*autodoc:\s*([A-Za-z_][\w.]*)\s*\}\}$/;
/** The smallest heading. */
const DEEPEST = 6;
/** The largest one that the table of contents leaves out. */
const UNLISTED = 4;
/** The kinds of pages that somebody reads to do something: there the reference is folded. */
const FOLDS = new Set(['tutorial', 'how-to']);

/**
 * @param {{children: object[]}} tree
 * @param {import('../markdown/source.mjs').Source} source
 * @param {import('./library.mjs').ApiLibrary} library
 */
export function expandHooks(tree, source, library) {
  const hooks = findHooks(tree, source);
  if (hooks.length === 0) {
    return;
  }
  const api = library.of(source.version);
  const hooked = new Set();
  for (const {name, node} of hooks) {
    if (!(name in api.objects)) {
      source.fail(
        `autodoc knows no object ${name}; write a public path of the library, such as ${nearest(name, api)}`,
        node,
      );
    }
    if (hooked.has(name)) {
      source.fail(`autodoc: ${name} stands on this page already; one hook is enough`, node);
    }
    hooked.add(name);
  }
  const writer = new ApiWriter(api, source, hooked);
  const isFolded = FOLDS.has(source.page.about?.kind);
  for (const {name, node, parent, depth} of hooks) {
    const place = parent.children.indexOf(node);
    const largest = isFolded ? Math.max(depth + 1, UNLISTED) : depth + 1;
    const written = writer.write(name, Math.min(largest, DEEPEST - 1), node);
    const fold = component('Fold', {role: 'api', name: name.split('.').slice(1).join('.')}, written);
    parent.children.splice(place, 1, ...(isFolded ? [fold] : written));
  }
}

/**
 * @param {{children: object[]}} tree
 * @param {import('../markdown/source.mjs').Source} source
 */
function findHooks(tree, source) {
  const hooks = [];
  let depth = 1;
  visit(tree, (node, _index, parent) => {
    if (node.type === 'heading') {
      depth = node.depth;
    } else if (node.type === 'paragraph') {
      const hook = HOOK.exec(source.slice(node).trim());
      if (hook) {
        hooks.push({name: hook[1], node, parent, depth});
        return SKIP;
      }
    }
    return undefined;
  });
  return hooks;
}

/**
 * An existing name with the same last part, or else one from the same module.
 *
 * @param {string} name
 * @param {{objects: Record<string, object>}} api
 */
function nearest(name, api) {
  const names = Object.keys(api.objects);
  const short = name.split('.').at(-1);
  return (
    names.find((known) => known.split('.').at(-1) === short) ??
    names.find((known) => known.startsWith(name.slice(0, name.lastIndexOf('.') + 1))) ??
    names[0]
  );
}
