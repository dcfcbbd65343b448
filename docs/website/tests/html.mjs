/** What the HTML of a page says, read without a browser: anchors, all that it links to or loads, words of its parts. */

import {Parser} from 'htmlparser2';

/** The attributes that hold an address, by the tag. */
const ADDRESSES = {
  a: ['href'],
  area: ['href'],
  iframe: ['src'],
  img: ['src', 'srcset'],
  link: ['href'],
  script: ['src'],
  source: ['src', 'srcset'],
  video: ['src', 'poster'],
};

/** Elements that hold nothing. */
const VOID = new Set(['area', 'base', 'br', 'col', 'embed', 'hr', 'img', 'input', 'link', 'meta', 'source', 'wbr']);

/**
 * @typedef {{tag: string, rel: string, address: string, isDownload: boolean}} Link
 * @typedef {{ids: Set<string>, objects: string[], contents: Set<string>, links: Link[]}} Outline The anchors; those of
 * documented objects in their order; what the table of contents leads to; the links.
 */

/**
 * @param {string} html
 * @returns {Outline}
 */
export function outlineOf(html) {
  const outline = {ids: new Set(), objects: [], folded: new Set(), contents: new Set(), links: []};
  let folds = 0; // how many details, of which the outermost is a fold, are open here
  const onopentag = (tag, attributes) => {
    const classes = (attributes.class ?? '').split(' ');
    [attributes.id, tag === 'a' && attributes.name].filter(Boolean).forEach((id) => outline.ids.add(id));
    if (classes.includes('api-object') || classes.includes('api-member')) {
      outline.objects.push(attributes.id);
      if (folds > 0) {
        outline.folded.add(attributes.id);
      }
    }
    folds += tag === 'details' && (folds > 0 || classes.includes('fold'));
    if (classes.includes('table-of-contents__link')) {
      outline.contents.add(attributes.href.replace('#', ''));
    }
    outline.links.push(...linksOf(tag, attributes));
  };
  const onclosetag = (tag) => {
    folds -= tag === 'details' && folds > 0;
  };
  new Parser({onopentag, onclosetag}).end(html);
  return outline;
}

/** @param {string} tag @param {Record<string, string>} attributes @returns {Link[]} */
function linksOf(tag, attributes) {
  return (ADDRESSES[tag] ?? [])
    .filter((name) => attributes[name] !== undefined)
    .flatMap((name) => (name === 'srcset' ? attributes[name].split(',').map(firstWord) : [attributes[name]]))
    .map((address) => ({tag, rel: attributes.rel, address, isDownload: 'download' in attributes}));
}

/** @param {string} text */
const firstWord = (text) => text.trim().split(/\s+/)[0];

/**
 * The words of every element of a class, in their order; line breaks of code are kept.
 *
 * @param {string} html
 * @param {string} name
 * @returns {{attributes: Record<string, string>, words: string}[]}
 */
export function elementsOf(html, name) {
  const found = [];
  const open = [];
  let depth = 0;
  const onopentag = (tag, attributes) => {
    depth += VOID.has(tag) ? 0 : 1;
    if ((attributes.class ?? '').split(' ').includes(name)) {
      const element = {attributes, words: ''};
      found.push(element);
      open.push({element, depth});
    }
    if (tag === 'br') {
      open.forEach(({element}) => (element.words += '\n'));
    }
  };
  const onclosetag = (tag) => {
    if (open.at(-1)?.depth === depth && !VOID.has(tag)) {
      open.pop();
    }
    depth -= VOID.has(tag) ? 0 : 1;
  };
  const ontext = (text) => open.forEach(({element}) => (element.words += text));
  new Parser({onopentag, onclosetag, ontext}, {decodeEntities: true}).end(html);
  return found;
}
