/** The sections of a built page as the search sees them. */

import {Parser} from 'htmlparser2';

/** What holds no words to search for: what is repeated on every page, and formulas, which are written three times. */
const SKIPPED = new Set(
  ['hash-link', 'page-status', 'run-page', 'stale-banner', 'output-head', 'katex'].concat(
    ['signature', 'source', 'type', 'default', 'label', 'bases'].map((part) => `api-${part}`),
  ),
);
const SILENT = new Set(['button', 'style', 'script', 'svg']);
const [TEXT, OBJECT, MEMBER, LINKS] = [0, 1, 2, 3];
/** The share of its words, in entries that begin with a link, from which on a section tells of other pages. */
const MOSTLY = 0.5;
const VOID = new Set(['area', 'br', 'col', 'hr', 'img', 'input', 'source', 'wbr']);
/** Words before and after which the words of other elements do not continue. */
const INLINE = new Set(['a', 'abbr', 'code', 'em', 'kbd', 'mark', 'span', 'strong', 'sub', 'sup', 'wbr']);

/**
 * @typedef {{anchor: string, heading: string, kind: number, text: string, code: string}} Section `kind`: 0 for text, 1 for
 * an object of the reference, 2 for a member of one, 3 for a list of links. The first section of a page has no anchor, and the page's title as
 * heading.
 */

/**
 * @param {string} html
 * @returns {Section[]} None for a page without an article.
 */
export function sectionsOf(html) {
  const reader = new Reader();
  new Parser(reader, {decodeEntities: true}).end(html);
  return reader.sections.map(({anchor, text, code, heading, kind, linked}) => ({
    anchor,
    kind: kind === TEXT && anchor && linked > MOSTLY * text.length ? LINKS : kind,
    heading: squeeze(heading),
    text: squeeze(text),
    code: newWords(code, text),
  }));
}

/** Follows the tags of a page, and notes for each element that is open what its words are. */
class Reader {
  constructor() {
    this.sections = [];
    /** What the words of the elements that are open belong to. */
    this.open = [];
    /** The entries of lists that are open: where their words begin, and whether with a link. */
    this.items = [];
  }

  get role() {
    return this.open.at(-1) ?? 'outside';
  }

  onopentag(tag, attributes) {
    const role = this.roleOf(tag, attributes);
    if (/^h[1-4]$/.test(tag) && role === 'heading') {
      const classes = (attributes.class ?? '').split(' ');
      const kind = classes.includes('api-object') ? OBJECT : classes.includes('api-member') ? MEMBER : TEXT;
      this.sections.push({anchor: attributes.id ?? '', heading: '', kind, text: '', code: '', linked: 0});
    }
    if (!INLINE.has(tag)) {
      this.ontext(' ');
    }
    this.followList(tag);
    if (!VOID.has(tag)) {
      this.open.push(role);
    }
  }

  onclosetag(tag) {
    if (tag === 'li') {
      this.items.pop();
    }
    if (!VOID.has(tag)) {
      this.open.pop();
    }
    if (!INLINE.has(tag)) {
      this.ontext(' ');
    }
  }

  ontext(words) {
    const section = this.sections.at(-1);
    if (section && this.role in section) {
      section[this.role] += words;
      section.linked += this.role === 'text' && this.items.some(({isLink}) => isLink) ? words.length : 0;
    }
  }

  /** @param {string} tag That opens. */
  followList(tag) {
    const text = this.sections.at(-1)?.text ?? '';
    const item = this.items.at(-1);
    if (tag === 'li') {
      this.items.push({start: text.length, isLink: false});
    } else if (tag === 'a' && item && text.slice(item.start).trim() === '') {
      item.isLink = true;
    }
  }

  /** @returns {string} The field of a section that words belong to, `skipped`, or `outside` of the article. */
  roleOf(tag, attributes) {
    const classes = (attributes.class ?? '').split(' ');
    if (this.role === 'outside') {
      return classes.includes('theme-doc-markdown') ? 'text' : 'outside';
    }
    if (this.role !== 'text') {
      return classes.some((name) => SKIPPED.has(name)) ? 'skipped' : this.role;
    }
    // The members of a class follow it, each with its own section.
    const isList = attributes['data-part'] === 'members';
    if (isList || SILENT.has(tag) || classes.some((name) => SKIPPED.has(name))) {
      return 'skipped';
    }
    return /^h[1-4]$/.test(tag) ? 'heading' : tag === 'pre' ? 'code' : 'text';
  }
}

/** @param {string} text */
const squeeze = (text) =>
  text
    .replace(/\u200b/g, '')
    .replace(/\s+/g, ' ')
    .replace(/ ([,.;:!?)\u3001\u3002\uff0c])/g, '$1')
    .trim();

/**
 * The names in code that its section does not say in words, each once: enough to find a section by its code.
 *
 * @param {string} code
 * @param {string} text
 */
function newWords(code, text) {
  const said = new Set(text.match(/[A-Za-z_]\w+/g));
  const names = new Set(code.match(/[A-Za-z_]\w{2,}/g));
  return [...names].filter((name) => !said.has(name)).join(' ');
}
