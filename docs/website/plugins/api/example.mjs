/** Examples of docstrings: an interactive session becomes code that can be copied, and what it printed. */

import {component} from '../markdown/tree.mjs';

const PROMPT = /^(?:>>>|\.\.\.)(?: |$)/;

/**
 * @param {string} session
 * @returns {object[]}
 */
export function exampleBlocks(session) {
  const parts = [];
  for (const line of session.replace(/\s+$/, '').split('\n')) {
    const isCode = PROMPT.test(line);
    if (parts.at(-1)?.isCode !== isCode) {
      parts.push({isCode, lines: []});
    }
    parts.at(-1).lines.push(line.replace(PROMPT, ''));
  }
  if (!parts.some(({isCode}) => isCode)) {
    return [{type: 'code', lang: 'python', value: session}];
  }
  return parts
    .map(({isCode, lines}) => ({isCode, value: lines.join('\n').replace(/^\n+|\s+$/g, '')}))
    .filter(({value}) => value)
    .map(({isCode, value}) =>
      isCode ? {type: 'code', lang: 'python', value} : component('Output', {}, [{type: 'code', lang: 'text', value}]),
    );
}
