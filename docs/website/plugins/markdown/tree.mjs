/** Helpers to walk and to build Markdown trees (mdast). */

/**
 * A component of the site, as a block.
 *
 * @param {string} name Capitalised: looked up among the MDX components.
 * @param {Record<string, string | undefined>} props Those that are undefined are left out.
 * @param {object[]} children
 */
export function component(name, props = {}, children = []) {
  return {type: 'mdxJsxFlowElement', name, attributes: attributes(props), children};
}

/**
 * A component or an element within a line.
 *
 * @param {string} name
 * @param {Record<string, string | undefined>} props
 * @param {object[]} children
 */
export function inline(name, props = {}, children = []) {
  return {type: 'mdxJsxTextElement', name, attributes: attributes(props), children};
}

/** @param {Record<string, string | undefined>} props */
function attributes(props) {
  return Object.entries(props)
    .filter(([, value]) => value !== undefined)
    .map(([name, value]) => ({type: 'mdxJsxAttribute', name, value}));
}

/** @param {string} value */
export const text = (value) => ({type: 'text', value});

/** @param {string} value */
export const code = (value) => ({type: 'inlineCode', value});

/**
 * Apply rewrites to every list of siblings, the innermost first.
 *
 * @param {{children?: object[]}} node
 * @param {((children: object[]) => object[])[]} rewrites
 */
export function rewriteSiblings(node, rewrites) {
  if (!node.children) {
    return;
  }
  for (const child of node.children) {
    rewriteSiblings(child, rewrites);
  }
  node.children = rewrites.reduce((children, rewrite) => rewrite(children), node.children);
}

/**
 * The words of a node and of all that is in it.
 *
 * @param {{value?: string, alt?: string, children?: object[]}} node
 * @returns {string}
 */
export function wordsOf(node) {
  return node.value ?? node.alt ?? (node.children ?? []).map(wordsOf).join('');
}
