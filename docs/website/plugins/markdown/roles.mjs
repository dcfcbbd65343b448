/** What code is for: checks and the drawing of figures are folded, and code that is written to a file bears its name. */

import {component} from './tree.mjs';

const PYTHON = new Set(['python', 'python3', 'py']);
const FOLDED = new Set(['check', 'figure']);
const FILE = /^file=(\S+)$/;

/** @param {{type: string, lang?: string, meta?: string}} node */
const isFolded = (node) => node.type === 'code' && PYTHON.has(node.lang) && FOLDED.has(node.meta);

/** @param {{type: string, name?: string}} node */
const isOutput = (node) => node.name === 'Output';

/**
 * Neighbors of one role share a fold, each with what it printed.
 *
 * @param {object[]} children
 */
export function foldRoles(children) {
  const folded = [];
  let open = null;
  children.forEach((node, place) => {
    if (isFolded(node)) {
      if (open?.role !== node.meta) {
        open = {role: node.meta, fold: component('Fold', {role: node.meta})};
        folded.push(open.fold);
      }
      open.fold.children.push({...node, meta: null});
    } else if (open && isOutput(node) && isFolded(children[place - 1])) {
      open.fold.children.push(node);
    } else {
      open = null;
      folded.push(node);
    }
  });
  return folded;
}

/**
 * @param {object[]} children
 */
export function nameFiles(children) {
  return children.map((node) => {
    const file = node.type === 'code' && PYTHON.has(node.lang) && FILE.exec(node.meta ?? '');
    return file ? {...node, meta: `title="${file[1]}"`} : node;
  });
}
