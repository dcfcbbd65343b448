/** The author's file behind a page of the site. */

import {relative, sep} from 'node:path';

/** The emitter puts three lines of front matter above the author's text. */
const ADDED_LINES = 3;

export class Source {
  /**
   * @param {import('vfile').VFile} file
   * @param {string} siteDir
   */
  constructor(file, siteDir) {
    this.file = file;
    this.text = String(file.value);
    const folders = relative(siteDir, file.path).split(sep);
    const version = /\/version-([^/]+)\//.exec(`/${folders.join('/')}`);
    /** The version of the page: a released one, or "current". */
    this.version = version ? version[1] : 'current';
    /** The page's path below the folder of its version and language. */
    this.path = folders.slice(folders[0] === 'i18n' ? 4 : folders[0] === 'docs' ? 1 : 2).join('/');
    this.page = file.data.frontMatter?.page ?? {};
  }

  /**
   * A node as the author wrote it. Its children do not tell: a directive such as `:name` splits them.
   *
   * @param {{position?: {start: {offset: number}, end: {offset: number}}}} node
   */
  slice(node) {
    return node.position ? this.text.slice(node.position.start.offset, node.position.end.offset) : '';
  }

  /**
   * What is shown in the place of an output block; undefined for the author's own text.
   *
   * @param {{position?: {start: {line: number}}}} node
   * @returns {string | undefined}
   */
  recordedOutput(node) {
    return this.page.recorded?.outputs[node.position?.start.line];
  }

  /**
   * Stop the build with the place in the author's file.
   *
   * @param {string} message
   * @param {{position?: {start: {line: number}}}} node
   * @returns {never}
   */
  fail(message, node) {
    const line = node.position?.start.line ?? 1;
    // A page of the reference is generated as a whole: it has no author's file with the same lines.
    const isAuthored = this.page.kind === 'tutorial';
    const place = isAuthored ? `${this.page.source}:${Math.max(1, line - ADDED_LINES)}` : `${this.path}:${line}`;
    this.file.fail(`${place}: ${message}`, node);
  }
}
