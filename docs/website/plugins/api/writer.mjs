/** Writes the documentation of an object as Markdown nodes, which the rest of the pipeline treats like the author's. */

import {visit} from 'unist-util-visit';
import {code, component, inline, text} from '../markdown/tree.mjs';
import {exampleBlocks} from './example.mjs';
import {SignatureWriter} from './signature.mjs';

export class ApiWriter {
  /**
   * @param {object} api The objects of the page's version.
   * @param {import('../markdown/source.mjs').Source} source
   * @param {Set<string>} hooked The objects that have a hook of their own on this page.
   */
  constructor(api, source, hooked) {
    this.api = api;
    this.source = source;
    this.hooked = hooked;
    const members = [...hooked].flatMap((name) => api.objects[name].members);
    /** What this page shows: hooked objects, and the members of hooked classes. */
    this.here = new Set([...hooked, ...members.filter((name) => name in api.objects)]);
    /** Members that stand on the page already: two names of one class share them. */
    this.written = new Set();
    this.signatures = new SignatureWriter((word) => this.#addressOfWord(word));
  }

  /**
   * Heading and documentation of an object, then those of its members which have no hook of their own.
   *
   * @param {string} name
   * @param {number} depth Level of the heading.
   * @param {object} hook The author's paragraph, for messages.
   */
  write(name, depth, hook) {
    const object = this.api.objects[name];
    const isReference = this.source.page.kind === 'api';
    if (isReference && object.alias_of) {
      return [heading(object, this.#labelOf(object), depth, 'api-object'), this.#alias(object)];
    }
    const members = object.members.filter((member) => member in this.api.objects);
    const inside = members.filter((member) => !this.hooked.has(member) && !this.written.has(member));
    inside.forEach((member) => this.written.add(member));
    const isMember = this.here.has(ownerName(name));
    return [
      isMember ? memberHeading(object, depth + 1) : heading(object, this.#labelOf(object), depth, 'api-object'),
      this.#entry(object, members, hook),
      ...inside.flatMap((member) => [
        memberHeading(this.api.objects[member], depth + 1),
        this.#entry(this.api.objects[member], [], hook),
      ]),
    ];
  }

  /**
   * @param {import('./library.mjs').ApiObject} object
   * @param {string[]} members
   * @param {object} hook
   */
  #entry(object, members, hook) {
    const parts = [
      component('ApiSignature', {kind: object.kind}, this.signatures.write(object, this.#ownerOf(object))),
      ...this.#bases(object),
      ...this.#prose(object.body, hook),
      ...this.#fields('parameters', object.params, hook),
      ...this.#fields('attributes', object.attributes, hook),
      ...this.#fields('returns', object.returns ? [object.returns] : [], hook),
      ...this.#fields('yields', object.yields ? [object.yields] : [], hook),
      ...this.#fields('raises', object.raises, hook),
      ...this.#labelled('communication', this.#prose(object.communication, hook)),
      ...this.#labelled('example', object.examples.flatMap(exampleBlocks)),
      ...this.#members(members, hook),
    ];
    const where = object.source ? `${object.source.file}:${object.source.line}` : undefined;
    return component('ApiEntry', {kind: object.kind, source: where, code: this.api.codeAddress(object)}, parts);
  }

  /**
   * In the reference, a second name leads to the first, which has the documentation.
   *
   * @param {import('./library.mjs').ApiObject} object
   */
  #alias(object) {
    const url = this.api.address(object.alias_of, this.source.path, this.here);
    const name = code(object.alias_of);
    const alias = component('ApiAlias', {}, [
      {type: 'paragraph', children: [url ? {type: 'link', url, children: [name]} : name]},
    ]);
    const signature = component('ApiSignature', {kind: object.kind}, this.signatures.name(object, null));
    return component('ApiEntry', {kind: object.kind}, [signature, alias]);
  }

  /** @param {import('./library.mjs').ApiObject} object */
  #bases(object) {
    const bases = object.bases.filter((base) => base !== 'object');
    if (bases.length === 0) {
      return [];
    }
    const names = bases.flatMap((base, index) => [...(index > 0 ? [text(', ')] : []), ...this.signatures.type(base)]);
    return [component('ApiBases', {}, [{type: 'paragraph', children: names}])];
  }

  /**
   * A table of names, types, defaults and descriptions.
   *
   * @param {string} label
   * @param {{name?: string, type: string | null, default?: string | null, body: object[]}[]} fields
   * @param {object} hook
   */
  #fields(label, fields, hook) {
    const rows = fields.map(({name, type, default: value, body}) =>
      component('ApiField', {}, [
        component('ApiFieldHead', {}, [
          ...(name ? [inline('ApiName', {}, [text(name)])] : []),
          ...(type ? [inline('ApiType', {}, this.signatures.type(type))] : []),
          ...(value === null || value === undefined ? [] : [inline('ApiDefault', {}, [text(value)])]),
        ]),
        component('ApiFieldBody', {}, this.#prose(body, hook)),
      ]),
    );
    return rows.length > 0 ? this.#labelled(label, [component('ApiFields', {}, rows)]) : [];
  }

  /**
   * What a class has, with the first sentence about each and a link to the rest.
   *
   * @param {string[]} members
   * @param {object} hook
   */
  #members(members, hook) {
    const rows = members.map((name) => {
      const member = this.api.objects[name];
      const link = {type: 'link', url: `#${name}`, children: [code(name.split('.').at(-1))]};
      return component('ApiField', {}, [
        component('ApiFieldHead', {}, [link]),
        component('ApiFieldBody', {}, this.#prose(member.body.slice(0, 1), hook)),
      ]);
    });
    return rows.length > 0 ? this.#labelled('members', [component('ApiFields', {}, rows)]) : [];
  }

  /**
   * @param {string} label
   * @param {object[]} nodes
   */
  #labelled(label, nodes) {
    return nodes.length > 0 ? [component('ApiPart', {label}, nodes)] : [];
  }

  /**
   * Prose of a docstring, with its links to objects made into addresses and its formulas into those of remark-math.
   *
   * @param {object[]} body
   * @param {object} hook
   */
  #prose(body, hook) {
    const nodes = structuredClone(body);
    visit({type: 'root', children: nodes}, (node, index, parent) => {
      if (node.type === 'math' || node.type === 'inlineMath') {
        node.data = mathData(node);
      } else if (node.type === 'link' && node.url.startsWith('api:')) {
        const name = node.url.slice('api:'.length);
        if (!(name in this.api.objects)) {
          this.source.fail(`the docstring behind this hook links to ${name}, which is not documented`, hook);
        }
        const url = this.api.address(name, this.source.path, this.here);
        parent.children.splice(index, 1, ...(url ? [{...node, url}] : node.children));
      }
    });
    return nodes;
  }

  /** @param {import('./library.mjs').ApiObject} object */
  #labelOf(object) {
    const owner = this.#ownerOf(object);
    const short = object.name.split('.').at(-1);
    return owner ? `${owner.split('.').at(-1)}.${short}` : short;
  }

  /**
   * The class that an object belongs to.
   *
   * @param {import('./library.mjs').ApiObject} object
   */
  #ownerOf(object) {
    const owner = ownerName(object.name);
    return ['class', 'exception'].includes(this.api.objects[owner]?.kind) ? owner : null;
  }

  /** @param {string} word */
  #addressOfWord(word) {
    const name = this.api.resolve(word);
    return name ? this.api.address(name, this.source.path, this.here) : null;
  }
}

/**
 * A heading whose anchor is the object's path. Docusaurus takes an id that a plugin sets, but strips its dots;
 * so the id answers with the path whatever is written to it.
 *
 * @param {import('./library.mjs').ApiObject} object
 * @param {string} label
 * @param {number} depth
 * @param {string} className
 */
function heading(object, label, depth, className) {
  const data = lasting({}, object.name);
  data.hProperties = lasting({className: [className]}, object.name);
  return {type: 'heading', depth, data, children: [code(label)]};
}

/**
 * The heading of a member below that of its class, which it need not repeat.
 *
 * @param {import('./library.mjs').ApiObject} object
 * @param {number} depth
 */
function memberHeading(object, depth) {
  return heading(object, object.name.split('.').at(-1), depth, 'api-member');
}

/** @param {string} name The path of a member or of an object in a module. */
const ownerName = (name) => name.slice(0, name.lastIndexOf('.'));

/**
 * @param {object} target
 * @param {string} id
 */
function lasting(target, id) {
  return Object.defineProperty(target, 'id', {enumerable: true, get: () => id, set: () => {}});
}

/** @param {{type: string, value: string}} node */
function mathData(node) {
  const className = ['language-math', node.type === 'math' ? 'math-display' : 'math-inline'];
  const formula = {type: 'element', tagName: 'code', properties: {className}, children: [text(node.value)]};
  return node.type === 'math'
    ? {hName: 'pre', hChildren: [formula]}
    : {hName: 'code', hProperties: {className}, hChildren: [text(node.value)]};
}
