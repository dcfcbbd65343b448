/** Signatures, set in lines and with links from the types that the site documents. */

import {inline, text} from '../markdown/tree.mjs';

/** Characters that a signature may have in one line. */
const WIDTH = 72;
const NAME = /[A-Za-z_][\w.]*/g;
const PREFIX = {var_positional: '*', var_keyword: '**'};

/** @param {string} value @param {string} className */
const span = (value, className) => inline('span', {className}, [text(value)]);

export class SignatureWriter {
  /**
   * @param {(word: string) => string | null} addressOf The address of what a word in a type names, if it has one.
   */
  constructor(addressOf) {
    this.addressOf = addressOf;
  }

  /**
   * @param {import('./library.mjs').ApiObject} object
   * @param {string | null} owner The class it belongs to.
   * @returns {object[]}
   */
  write(object, owner) {
    return [...this.name(object, owner), ...(object.signature ? this.#call(object) : []), ...this.#result(object)];
  }

  /**
   * The path of an object, its last part standing out.
   *
   * @param {import('./library.mjs').ApiObject} object
   * @param {string | null} owner The class it belongs to.
   * @returns {object[]}
   */
  name({name}, owner) {
    const path = name.slice(0, name.lastIndexOf('.') + 1);
    const module = owner ? owner.slice(0, owner.lastIndexOf('.') + 1) : path;
    return [
      span(module, 'sig-module'),
      ...(owner ? [span(path.slice(module.length), 'sig-owner')] : []),
      span(name.slice(path.length), 'sig-name'),
    ];
  }

  /**
   * A type, with links in it.
   *
   * @param {string} type
   * @returns {object[]}
   */
  type(type) {
    const nodes = [];
    let end = 0;
    for (const {0: word, index} of type.matchAll(NAME)) {
      const url = this.addressOf(word);
      if (url) {
        nodes.push(text(type.slice(end, index)), {type: 'link', url, children: [text(word)]});
        end = index + word.length;
      }
    }
    return [...nodes, text(type.slice(end))].filter((node) => node.type !== 'text' || node.value);
  }

  /** @param {import('./library.mjs').ApiObject} object */
  #call({signature, name, return_type}) {
    const parts = withMarks(signature).map((argument) => this.#argument(argument));
    const length = parts.reduce((sum, part) => sum + width(part) + 2, name.length + (return_type?.length ?? 0) + 4);
    if (parts.length === 0) {
      return [text('()')];
    }
    if (length <= WIDTH) {
      return [text('('), ...parts.flatMap((part, index) => [...(index > 0 ? [text(', ')] : []), ...part]), text(')')];
    }
    return [text('(\n'), ...parts.flatMap((part) => [text('    '), ...part, text(',\n')]), text(')')];
  }

  /** @param {import('./library.mjs').Argument} argument */
  #argument({name, kind, type, default: value}) {
    const equals = type ? ' = ' : '=';
    return [
      span(`${PREFIX[kind] ?? ''}${name}`, 'sig-argument'),
      ...(type ? [text(': '), ...this.type(type)] : []),
      ...(value === null || value === undefined ? [] : [text(equals), span(value, 'sig-default')]),
    ];
  }

  /** @param {import('./library.mjs').ApiObject} object */
  #result({signature, return_type}) {
    return return_type ? [text(signature ? ' -> ' : ': '), ...this.type(return_type)] : [];
  }
}

/**
 * The arguments, with `/` after those that have a place only and `*` before those that have a name only.
 *
 * @param {import('./library.mjs').Argument[]} signature
 */
function withMarks(signature) {
  const mark = (name) => ({name, kind: 'mark', type: null, default: null});
  const kinds = signature.map(({kind}) => kind);
  const arguments_ = [...signature];
  const lastPlaceOnly = kinds.lastIndexOf('positional_only');
  const firstNameOnly = kinds.indexOf('keyword_only');
  if (firstNameOnly >= 0 && !kinds.includes('var_positional')) {
    arguments_.splice(firstNameOnly, 0, mark('*'));
  }
  if (lastPlaceOnly >= 0) {
    arguments_.splice(lastPlaceOnly + 1, 0, mark('/'));
  }
  return arguments_;
}

/** @param {object[]} nodes */
function width(nodes) {
  return nodes.reduce((sum, node) => sum + (node.value?.length ?? width(node.children)), 0);
}
