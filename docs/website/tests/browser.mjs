/** Pages in a real browser, with everything noted down that a page of ours must not do. */

import {chromium} from 'playwright-core';

const EXECUTABLE = process.env.CHROMIUM ?? '/usr/bin/chromium';
export const DESKTOP = {width: 1280, height: 900};
export const PHONE = {width: 390, height: 844};
/** Pages that are open at the same time. */
const VISITORS = 3;

export async function launchBrowser() {
  return chromium.launch({executablePath: EXECUTABLE, args: ['--no-sandbox', '--disable-quic', '--disable-sync']});
}

/**
 * @typedef {{page: import('playwright-core').Page, complaints: string[]}} Watched
 */

/**
 * Run something with a fresh page; then fail if the page complained.
 *
 * @template T
 * @param {{browser: import('playwright-core').Browser, url: string}} site
 * @param {(page: import('playwright-core').Page, complaints: string[]) => Promise<T>} use
 * @param {import('playwright-core').BrowserContextOptions} options
 * @returns {Promise<T>}
 */
export async function withPage(site, use, options = {}) {
  const context = await site.browser.newContext({viewport: DESKTOP, ...options});
  try {
    const page = await context.newPage();
    const complaints = watch(page, site.url);
    const result = await use(page, complaints);
    if (complaints.length > 0) {
      throw new Error(complaints.join('\n'));
    }
    return result;
  } finally {
    await context.close();
  }
}

/**
 * Note errors on the console, uncaught errors, requests that fail, and requests to anywhere but the site.
 *
 * @param {import('playwright-core').Page} page
 * @param {string} url
 * @returns {string[]} Grows while the page lives.
 */
function watch(page, url) {
  const complaints = [];
  const note = (text) => complaints.push(`${new URL(page.url(), url).pathname}: ${text}`);
  page.on('console', (message) => message.type() === 'error' && note(`console error: ${message.text()}`));
  page.on('pageerror', (error) => note(`uncaught error: ${error.message}`));
  page.on('requestfailed', (request) => {
    // A page that is left while it still prefetches cancels the rest.
    if (request.failure().errorText !== 'net::ERR_ABORTED') {
      note(`request failed: ${request.url()}: ${request.failure().errorText}`);
    }
  });
  page.on('response', (response) => response.status() >= 400 && note(`answer ${response.status()}: ${response.url()}`));
  page.on('request', (request) => {
    const isOwn = request.url().startsWith(`${url}/`) || /^(data|blob):/.test(request.url());
    if (!isOwn) {
      note(`remote request: ${request.url()}`);
    }
  });
  return complaints;
}

/**
 * Go to a page, and wait until React has taken it over.
 *
 * @param {import('playwright-core').Page} page
 * @param {string} address
 */
export async function open(page, address) {
  await page.goto(address, {waitUntil: 'load'});
  await page.waitForFunction(() => document.documentElement.dataset.hasHydrated === 'true');
}

/**
 * @param {boolean} isTrue
 * @param {string} message
 */
export function ensure(isTrue, message) {
  if (!isTrue) {
    throw new Error(message);
  }
}

/**
 * Visit a list of places with a few pages at a time, each of which goes from place to place; all failures together
 * are the failure of the whole.
 *
 * @template T
 * @param {{browser: import('playwright-core').Browser, url: string}} site
 * @param {T[]} places
 * @param {(page: import('playwright-core').Page, place: T, complaints: string[]) => Promise<void>} visit
 */
export async function visitAll(site, places, visit) {
  const queue = [...places];
  const failures = [];
  const visitor = (page, complaints) => visitRest(queue, failures, (place) => visit(page, place, complaints));
  const visitors = Array.from({length: VISITORS}, () =>
    withPage(site, visitor).catch(({message}) => failures.push(message)),
  );
  await Promise.all(visitors);
  if (failures.length > 0) {
    throw new Error(failures.join('\n'));
  }
}

/**
 * @template T
 * @param {T[]} queue
 * @param {string[]} failures
 * @param {(place: T) => Promise<void>} visit
 */
async function visitRest(queue, failures, visit) {
  for (let place = queue.shift(); place !== undefined; place = queue.shift()) {
    await visit(place).catch(({message}) => failures.push(`${place.address ?? place}: ${message}`));
  }
}
