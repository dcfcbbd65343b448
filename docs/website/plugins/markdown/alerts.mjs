/** GitHub's alerts (`> [!NOTE]`) become admonitions. */

const MARK = /^\[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\][ \t]*(?:\n|$)/;

/**
 * @param {object[]} children
 */
export function toAdmonitions(children) {
  return children.map((node) => {
    const words = node.type === 'blockquote' && node.children[0]?.children?.[0];
    const mark = words?.type === 'text' && MARK.exec(words.value);
    return mark ? admonition(node, mark) : node;
  });
}

/**
 * @param {object} quote
 * @param {RegExpExecArray} mark
 */
function admonition(quote, mark) {
  const [first, ...rest] = quote.children;
  const [words, ...others] = first.children;
  const opening = {...first, children: [{...words, value: words.value.slice(mark[0].length)}, ...others]};
  const isEmpty = others.length === 0 && !opening.children[0].value;
  return {
    type: 'admonition',
    data: {hName: 'admonition', hProperties: {type: mark[1].toLowerCase()}},
    children: isEmpty ? rest : [opening, ...rest],
  };
}
