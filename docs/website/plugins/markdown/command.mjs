/** The command that runs the page, which the author writes in the last comment. */

import {commentsOf} from './comments.mjs';
import {component} from './tree.mjs';

const COMMAND = /^doc-test-command:\s*(.+)$/;
/** What stands in the place of a command on a page without a program. */
const NONE = 'none';

/**
 * @param {object[]} children
 */
export function attachCommand(children) {
  return children.flatMap((node) => {
    const command = commentsOf(node)
      .map((comment) => COMMAND.exec(comment))
      .find(Boolean);
    const isProgram = command && command[1].trim() !== NONE;
    return isProgram ? [component('RunPage', {command: command[1].trim()})] : [node];
  });
}
