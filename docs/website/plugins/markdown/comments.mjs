/** HTML comments: what they say to the tools, and their removal. */

const COMMENT = /<!--([\s\S]*?)-->/g;

/**
 * The contents of the comments in a node, in order; one node may hold several when no blank line is between them.
 *
 * @param {{type: string, value?: string}} node
 * @returns {string[]}
 */
export function commentsOf(node) {
  // Three dashes open a comment as well: the third is no part of what it says.
  return node.type === 'html' ? [...node.value.matchAll(COMMENT)].map(([, said]) => said.replace(/^-/, '').trim()) : [];
}

/**
 * Remove comments; what stands beside them in the same node stays.
 *
 * @param {object[]} children
 */
export function dropComments(children) {
  return children.flatMap((node) => {
    if (commentsOf(node).length === 0) {
      return [node];
    }
    const value = node.value.replace(COMMENT, '');
    return value.trim() ? [{...node, value}] : [];
  });
}
