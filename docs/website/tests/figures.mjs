/**
 * What is wrong with a figure, and contact sheets: `node tests/figures.mjs [--sheets FOLDER] [--column PIXELS] [FILE...]`.
 *
 * Text must be readable at the width at which a page shows the figure, overlap no other text, stay in the
 * figure, and be in one area or none. Without files all figures of the pages' sources are measured, in both languages; a
 * sheet shows the figures of a folder in light or dark mode.
 */

import {mkdirSync, readFileSync, readdirSync} from 'node:fs';
import {basename, dirname, join, resolve} from 'node:path';
import {fileURLToPath, pathToFileURL} from 'node:url';
import {parseArgs} from 'node:util';
import {launchBrowser} from './browser.mjs';

/** In pixels: the least size of text on a desktop. */
const LEAST_SIZE = 12;
/** The width of a figure on a desktop, at most, and on a phone, where it scrolls; the check of the site measures them. */
const COLUMN = {desktop: 692, phone: 576};
const STYLES = ['tokens.css', 'base.css', 'content.css'];
/** Figures on a sheet, so that it can be looked at. */
const SHEET = 12;
const SCHEMES = ['light', 'dark'];
const WEBSITE = fileURLToPath(new URL('..', import.meta.url));
const LANGUAGES = ['en', 'zh-Hans'];

/**
 * @typedef {{width: number, size: number, faults: string[]}} Measured The width and the least size of text, in pixels
 *   of the page that shows the figure.
 */

/**
 * Open a figure by itself, and measure its text.
 *
 * @param {import('playwright-core').Page} page
 * @param {string} address That of the SVG.
 * @param {number} column The width that the page has for it; a figure is never enlarged.
 * @returns {Promise<Measured>}
 */
export async function measureFigure(page, address, column) {
  await page.goto(address);
  const {width, height, texts} = await page.evaluate(readShapes);
  const scale = Math.min(1, column / width);
  const sizes = texts.map(({size}) => size * scale);
  const faults = texts.flatMap((text, index) => [
    ...(sizes[index] < LEAST_SIZE - 0.05 ? [`"${text.words}" is ${sizes[index].toFixed(1)} px high`] : []),
    ...(leaves(text.corners, {left: 0, right: width, top: 0, bottom: height}) ? [`"${text.words}" leaves it`] : []),
    ...(text.isCrossed ? [`an edge crosses "${text.words}"`] : []),
    ...texts
      .slice(index + 1)
      .filter((other) => overlap(text.corners, other.corners))
      .map((other) => `"${text.words}" overlaps "${other.words}"`),
  ]);
  return {width: width * scale, size: Math.min(...sizes), faults};
}

/** Runs in the browser: the corners and sizes of all text, in pixels of the figure, and what an edge crosses. */
function readShapes() {
  const svg = document.documentElement;
  const cornersOf = (element, {x, y, width, height}) => {
    const matrix = element.getScreenCTM();
    const corners = [[x, y], [x + width, y], [x + width, y + height], [x, y + height]]; // prettier-ignore
    return corners.map(([left, top]) => new DOMPoint(left, top).matrixTransform(matrix)).map(({x, y}) => [x, y]);
  };
  /** A line is higher than its letters. */
  const letters = ({x, y, width, height}) => ({x, y: y + 0.12 * height, width, height: 0.8 * height});
  const sizeOf = (element) => {
    const {a, b, c, d} = element.getScreenCTM();
    // Exponents are smaller than the text that they belong to.
    const sizes = [element, ...element.querySelectorAll('tspan')].filter(({firstChild}) => firstChild?.nodeType === 3);
    const largest = Math.max(...sizes.map((part) => parseFloat(getComputedStyle(part).fontSize)));
    return largest * Math.sqrt(Math.abs(a * d - b * c));
  };
  /** Some points of a text are in a filled shape, and some are not. */
  const crosses = (shape, [first, second, , last]) => {
    const toShape = shape.getScreenCTM().inverse();
    const [rows, columns] = [[0.25, 0.75], [0.06, 0.2, 0.4, 0.6, 0.8, 0.94]]; // prettier-ignore
    const inside = rows.flatMap((down) =>
      columns.map((right) => {
        const at = [0, 1].map((i) => first[i] + right * (second[i] - first[i]) + down * (last[i] - first[i]));
        return shape.isPointInFill(new DOMPoint(...at).matrixTransform(toShape));
      }),
    );
    return inside.includes(true) && inside.includes(false);
  };
  const shown = (selector) =>
    [...document.querySelectorAll(selector)].filter((each) => !each.closest('defs, clipPath, marker'));
  const areas = shown('rect, path, polygon').filter((shape) => getComputedStyle(shape).fill !== 'none');
  return {
    width: svg.getBoundingClientRect().width,
    height: svg.getBoundingClientRect().height,
    texts: shown('text')
      .filter((text) => text.textContent.trim() !== '')
      .map((text) => {
        const corners = cornersOf(text, letters(text.getBBox()));
        const isCrossed = areas.some((shape) => crosses(shape, corners));
        return {words: text.textContent.trim(), size: sizeOf(text), corners, isCrossed};
      }),
  };
}

/** @param {number[][]} corners */
function boundsOf(corners) {
  const [xs, ys] = [corners.map(([x]) => x), corners.map(([, y]) => y)];
  return {left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys)};
}

/** Text may touch an edge. */
function leaves(corners, edge) {
  const {left, right, top, bottom} = boundsOf(corners);
  return left < edge.left - 0.5 || right > edge.right + 0.5 || top < edge.top - 0.5 || bottom > edge.bottom + 0.5;
}

/** Whether two rectangles, which may be turned, share more than an edge: no side of either separates them. */
function overlap(one, other) {
  const sides = [one, other].flatMap(([first, second, third]) => [
    [second[0] - first[0], second[1] - first[1]],
    [third[0] - second[0], third[1] - second[1]],
  ]);
  return sides.every(([x, y]) => {
    const length = Math.hypot(x, y) || 1;
    const along = (corners) => corners.map((corner) => (corner[0] * x + corner[1] * y) / length);
    const [mine, theirs] = [along(one), along(other)];
    return Math.min(Math.max(...mine), Math.max(...theirs)) - Math.max(Math.min(...mine), Math.min(...theirs)) > 0.5;
  });
}

/**
 * Write a picture of many figures, each as a page shows it.
 *
 * @param {import('playwright-core').Page} page
 * @param {string[]} files
 * @param {string} scheme
 * @param {string} target
 */
async function writeSheet(page, files, scheme, target) {
  const css = STYLES.map((name) => readFileSync(join(WEBSITE, 'src/css', name), 'utf8')).join('\n');
  const figures = files.map((file) => {
    const address = `data:image/svg+xml;base64,${readFileSync(file).toString('base64')}`;
    return `<div><code>${basename(file)}</code><img src="${address}" style="max-width:100%"></div>`;
  });
  await page.setViewportSize({width: 2 * COLUMN.desktop + 60, height: 900});
  await page.goto('about:blank');
  await page.setContent(
    `<!doctype html><html data-theme="${scheme}"><style>${css}
    body {background: var(--paper); color: var(--ink); margin: 0}
    main {columns: 2; column-gap: 20px; max-width: none !important; padding: 20px; width: ${2 * COLUMN.desktop + 20}px}
    div {break-inside: avoid}</style><main class="theme-doc-markdown">${figures.join('')}</main></html>`,
    {waitUntil: 'load'},
  );
  await page.screenshot({path: target, fullPage: true});
}

/**
 * @param {import('playwright-core').Page} page
 * @param {string[]} files
 * @param {string} target A folder.
 */
async function writeSheets(page, files, target) {
  mkdirSync(target, {recursive: true});
  for (const folder of new Set(files.map(dirname))) {
    const figures = files.filter((file) => dirname(file) === folder);
    for (let first = 0; first < figures.length; first += SHEET) {
      for (const scheme of SCHEMES) {
        const name = `${basename(dirname(folder))}-${scheme}-${first / SHEET + 1}.png`;
        await writeSheet(page, figures.slice(first, first + SHEET), scheme, join(target, name));
      }
    }
  }
}

/** @param {string[]} files */
async function main({files, sheets, column}) {
  const browser = await launchBrowser();
  const page = await browser.newPage();
  let count = 0;
  for (const file of files) {
    const {size, width, faults} = await measureFigure(page, pathToFileURL(file).href, column);
    const onPhone = (size * Math.min(1, COLUMN.phone / width)).toFixed(1);
    const name = `${basename(dirname(dirname(file)))}/${basename(file)}`;
    process.stdout.write(`${name}: text from ${size.toFixed(1)} px, ${onPhone} px on a phone\n`);
    faults.forEach((fault) => process.stdout.write(`  ${fault}\n`));
    count += faults.length;
  }
  if (sheets) {
    await writeSheets(page, files, sheets);
  }
  await browser.close();
  process.stdout.write(`${files.length} figures, ${count} faults\n`);
  return count;
}

/** The figures of the pages' sources. */
function allFigures() {
  return LANGUAGES.map((language) => join(WEBSITE, '../source', language, 'images')).flatMap((folder) =>
    readdirSync(folder)
      .filter((name) => name.endsWith('.svg'))
      .sort()
      .map((name) => join(folder, name)),
  );
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const {values, positionals} = parseArgs({
    options: {sheets: {type: 'string'}, column: {type: 'string', default: String(COLUMN.desktop)}},
    allowPositionals: true,
  });
  const files = positionals.length > 0 ? positionals.map((file) => resolve(file)) : allFigures();
  process.exitCode = (await main({...values, files, column: Number(values.column)})) > 0 ? 1 : 0;
}
