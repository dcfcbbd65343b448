/**
 * Colours of code, light and dark. Every pair with its background has a contrast of at least 4.5.
 *
 * @param {Record<'plain' | 'background' | 'comment' | 'keyword' | 'string' | 'number' | 'name' | 'type', string>} ink
 * @returns {import('prism-react-renderer').PrismTheme}
 */
function theme(ink) {
  return {
    plain: {color: ink.plain, backgroundColor: ink.background},
    styles: [
      {types: ['comment', 'prolog', 'cdata'], style: {color: ink.comment, fontStyle: 'italic'}},
      {types: ['keyword', 'boolean', 'operator-word', 'tag', 'selector', 'important'], style: {color: ink.keyword}},
      {types: ['string', 'char', 'attr-value', 'triple-quoted-string', 'inserted'], style: {color: ink.string}},
      {types: ['number', 'constant', 'symbol', 'variable', 'parameter'], style: {color: ink.number}},
      {types: ['function', 'property', 'attr-name'], style: {color: ink.name}},
      {types: ['class-name', 'builtin', 'decorator', 'namespace'], style: {color: ink.type}},
      {types: ['deleted'], style: {color: ink.keyword}},
    ],
  };
}

export const prismLight = theme({
  plain: '#24282c',
  background: '#f5f3ee',
  comment: '#6b675f',
  keyword: '#a8320a',
  string: '#2f6b35',
  number: '#0f5f8a',
  name: '#24282c',
  type: '#6a4199',
});

export const prismDark = theme({
  plain: '#dedbd4',
  background: '#1b1d20',
  comment: '#96928a',
  keyword: '#ff9d74',
  string: '#a3cf96',
  number: '#8cc4e6',
  name: '#dedbd4',
  type: '#cdaef0',
});
