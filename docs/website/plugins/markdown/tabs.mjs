/** Alternatives between the comments `tabs-start: group` and `tabs-end`; bold text alone in a paragraph opens a tab. */

import {commentsOf} from './comments.mjs';
import {component, wordsOf} from './tree.mjs';

const START = /^tabs-start:\s*(\S+)$/;
const END = /^tabs-end$/;

/**
 * @param {object[]} children
 * @param {import('./source.mjs').Source} source
 */
export function groupTabs(children, source) {
  const grouped = [];
  let open = null;
  for (const node of children) {
    const comments = commentsOf(node);
    const start = comments.map((comment) => START.exec(comment)).find(Boolean);
    if (start) {
      open = {group: start[1], start: node, tabs: []};
    } else if (open && comments.some((comment) => END.test(comment))) {
      grouped.push(tabs(open, source));
      open = null;
    } else if (!open) {
      grouped.push(node);
    } else if (isTitle(node)) {
      open.tabs.push({label: wordsOf(node), children: []});
    } else if (open.tabs.length > 0) {
      open.tabs.at(-1).children.push(node);
    } else if (comments.length === 0) {
      source.fail('a tab opens with a paragraph of bold text; found other content after tabs-start', node);
    }
  }
  if (open) {
    source.fail('tabs-start has no tabs-end after it', open.start);
  }
  return grouped;
}

/** @param {{type: string, children?: object[]}} node */
function isTitle(node) {
  return node.type === 'paragraph' && node.children.length === 1 && node.children[0].type === 'strong';
}

/**
 * @param {{group: string, start: object, tabs: {label: string, children: object[]}[]}} open
 * @param {import('./source.mjs').Source} source
 */
function tabs(open, source) {
  if (open.tabs.length === 0) {
    source.fail('tabs-start has no tab after it: write its title as a paragraph of bold text', open.start);
  }
  const items = open.tabs.map(({label, children}) => component('TabItem', {value: label, label}, children));
  return component('Tabs', {groupId: open.group}, items);
}
