/** A plain static server: files as they are, a folder's index.html, 404.html for the rest; compressed, as hosts do. */

import {randomBytes} from 'node:crypto';
import {createServer} from 'node:http';
import {readFile, stat} from 'node:fs/promises';
import {extname, join, normalize} from 'node:path';
import {gzipSync} from 'node:zlib';

const TYPES = {
  '.html': 'text/html; charset=utf-8',
  '.js': 'text/javascript; charset=utf-8',
  '.css': 'text/css; charset=utf-8',
  '.json': 'application/json; charset=utf-8',
  '.svg': 'image/svg+xml',
  '.xml': 'application/xml',
  '.woff2': 'font/woff2',
  '.py': 'text/x-python; charset=utf-8',
};
const COMPRESSED = new Set(['.html', '.js', '.css', '.json', '.svg', '.xml']);

/**
 * How the site is spoilt, to prove that a check sees it: something put into each page, a pattern replaced in it, its
 * scripts left out, files that are missing, or a script of so many bytes that do not compress.
 *
 * @typedef {{html?: string, replace?: [RegExp, string], noScripts?: boolean, missing?: RegExp, ballast?: number}} Spoil
 */

/**
 * @param {string} folder The built site.
 * @param {Spoil} spoil
 * @returns {Promise<{url: string, close: () => Promise<void>}>}
 */
export async function serve(folder, spoil = {}) {
  const server = createServer((request, response) => {
    answer(folder, spoil, request, response).catch((error) => response.writeHead(500).end(String(error)));
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    close: () => new Promise((resolve) => server.close(resolve).closeAllConnections()),
  };
}

/**
 * @param {string} folder
 * @param {Spoil} spoil
 * @param {import('node:http').IncomingMessage} request
 * @param {import('node:http').ServerResponse} response
 */
async function answer(folder, spoil, request, response) {
  const path = normalize(decodeURIComponent(new URL(request.url, 'http://site').pathname));
  if (spoil.ballast && path === '/ballast.js') {
    response.writeHead(200, {'Content-Type': TYPES['.js']}).end(`//${randomBytes(spoil.ballast).toString('base64')}`);
    return;
  }
  const file = spoil.missing?.test(path) ? null : await findFile(join(folder, path));
  const found = file ?? join(folder, path.startsWith('/zh-Hans/') ? 'zh-Hans' : '', '404.html');
  const kind = extname(found);
  const content = await readFile(found);
  const body = kind === '.html' ? spoilPage(content.toString(), spoil) : content;
  const headers = {'Content-Type': TYPES[kind] ?? 'application/octet-stream', 'Cache-Control': 'max-age=3600'};
  if (COMPRESSED.has(kind) && /\bgzip\b/.test(request.headers['accept-encoding'] ?? '')) {
    response.writeHead(file ? 200 : 404, {...headers, 'Content-Encoding': 'gzip'}).end(gzipSync(body));
  } else {
    response.writeHead(file ? 200 : 404, headers).end(body);
  }
}

/**
 * @param {string} html
 * @param {Spoil} spoil
 */
function spoilPage(html, {html: addition = '', replace, noScripts}) {
  const readable = noScripts ? html.replace(/<script\b[\s\S]*?<\/script>/g, '') : html;
  const replaced = replace ? readable.replace(...replace) : readable;
  return replaced.replace(/(<\/body>|$)/, `${addition}$1`);
}

/** @param {string} path */
async function findFile(path) {
  const found = await stat(path).catch(() => null);
  if (found?.isFile()) {
    return path;
  }
  const index = join(path, 'index.html');
  return found?.isDirectory() && (await stat(index).catch(() => null)) ? index : null;
}
