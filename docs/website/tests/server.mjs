/** A plain static server: files as they are, a folder's index.html, 404.html for the rest. It compresses, as hosts do. */

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
 * @param {string} folder The built site.
 * @returns {Promise<{url: string, close: () => Promise<void>}>}
 */
export async function serve(folder) {
  const server = createServer((request, response) => {
    answer(folder, request, response).catch((error) => response.writeHead(500).end(String(error)));
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    close: () => new Promise((resolve) => server.close(resolve).closeAllConnections()),
  };
}

/**
 * @param {string} folder
 * @param {import('node:http').IncomingMessage} request
 * @param {import('node:http').ServerResponse} response
 */
async function answer(folder, request, response) {
  const path = normalize(decodeURIComponent(new URL(request.url, 'http://site').pathname));
  const file = await findFile(join(folder, path));
  const found = file ?? join(folder, path.startsWith('/zh-Hans/') ? 'zh-Hans' : '', '404.html');
  const body = await readFile(found);
  const kind = extname(found);
  const headers = {'Content-Type': TYPES[kind] ?? 'application/octet-stream', 'Cache-Control': 'max-age=3600'};
  if (COMPRESSED.has(kind) && /\bgzip\b/.test(request.headers['accept-encoding'] ?? '')) {
    response.writeHead(file ? 200 : 404, {...headers, 'Content-Encoding': 'gzip'}).end(gzipSync(body));
  } else {
    response.writeHead(file ? 200 : 404, headers).end(body);
  }
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
