/** The command that runs the page, which the author writes in the last comment. */

import {commentsOf} from './comments.mjs';
import {component} from './tree.mjs';

const COMMAND = /^doc-test-command:\s*(.+)$/;

/**
 * @param {object[]} children
 */
export function attachCommand(children) {
  return children.flatMap((node) => {
    const command = commentsOf(node)
      .map((comment) => COMMAND.exec(comment))
      .find(Boolean);
    return command ? [component('RunPage', {command: command[1].trim()})] : [node];
  });
}
