/** Regions that the tests leave out: their blocks say so, and why. */

import {commentsOf} from './comments.mjs';
import {component} from './tree.mjs';

const START = /^doc-test-ignore-start(?::\s*([\s\S]*))?$/;
const END = /^doc-test-ignore-end$/;
/** Languages of blocks that a reader would take for something that ran. */
const PROGRAMS = new Set(['python', 'python3', 'py', 'shell', 'bash', 'sh', 'console']);

/**
 * @param {object[]} children
 * @param {import('./source.mjs').Source} source
 */
export function markIgnored(children, source) {
  let reason = null;
  let opened = null;
  const marked = children.map((node) => {
    for (const comment of commentsOf(node)) {
      const start = START.exec(comment);
      if (start) {
        [reason, opened] = [start[1]?.trim() ?? '', node];
      } else if (END.test(comment)) {
        [reason, opened] = [null, null];
      }
    }
    return reason !== null && node.type === 'code' && PROGRAMS.has(node.lang)
      ? component('NotRun', {reason}, [node])
      : node;
  });
  if (opened) {
    source.fail('doc-test-ignore-start has no doc-test-ignore-end after it', opened);
  }
  return marked;
}
