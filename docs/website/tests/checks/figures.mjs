/** Figures: the text of every one is readable where a page shows it, and overlaps nothing. */

import {DESKTOP, PHONE, ensure, open, visitAll} from '../browser.mjs';
import {measureFigure} from '../figures.mjs';

/** In pixels; a figure scrolls on a phone. */
const LEAST_ON_PHONE = 10;
const WITH_FIGURE = /!\[[^\]]*\]\([^)]*\.svg/;
/** A figure that a page is spoilt with. */
const figure = (...texts) => {
  const svg = `<svg xmlns='http://www.w3.org/2000/svg' width='300' height='60' font-size='14'>${texts.join('')}</svg>`;
  return `<div class="theme-doc-markdown"><img alt="x" src="data:image/svg+xml,${encodeURIComponent(svg)}"></div>`;
};

export const figures = {
  name: 'text in figures is readable on a desktop and on a phone, and overlaps nothing',
  async run(site) {
    const shown = new Map();
    const addresses = site.opened.filter((address) => WITH_FIGURE.test(site.markdown.get(address) ?? ''));
    await visitAll(site, addresses, async (page, address) => {
      await page.setViewportSize(DESKTOP);
      await open(page, site.url + address);
      const images = await page.evaluate(readImages);
      await page.setViewportSize(PHONE);
      const onPhone = await page.evaluate(readImages);
      images.forEach((image, index) =>
        shown.set(image.address, {...image, page: address, phoneWidth: onPhone[index].width}),
      );
    });
    // Not a page of the site, whose complaints count: a browser asks for the icon of an SVG that it opens.
    const page = await site.browser.newPage();
    const faults = [];
    for (const {address, page: place, alt, width, phoneWidth} of shown.values()) {
      const measured = await measureFigure(page, address, width);
      const phoneSize = (measured.size * phoneWidth) / measured.width;
      const all =
        phoneSize < LEAST_ON_PHONE ? [...measured.faults, `${phoneSize.toFixed(1)} px on a phone`] : measured.faults;
      faults.push(...all.map((fault) => `${place}: in the figure "${alt}" ${fault}`));
    }
    await page.close();
    ensure(faults.length === 0, faults.join('\n'));
    return `${shown.size} figures of ${addresses.length} pages`;
  },
  spoils: [
    {html: '<style>.theme-doc-markdown img {min-width: 0 !important; width: 347px}</style>', expect: /px high/},
    {html: '<style>.theme-doc-markdown img {min-width: 0 !important}</style>', expect: /px on a phone/},
    {
      html: figure('<text x="9" y="20">one</text>', '<text x="20" y="24">other</text>'),
      expect: /"one" overlaps "other"/,
    },
    {html: figure('<text x="280" y="20">too far right</text>'), expect: /"too far right" leaves it/},
    {
      html: figure('<rect width="40" height="40"/>', '<text x="9" y="20">too wide a label</text>'),
      expect: /an edge crosses "too wide a label"/,
    },
  ],
};

/** Runs in the browser: the SVG figures of a page, and how wide it shows each. */
async function readImages() {
  const images = [...document.querySelectorAll('.theme-doc-markdown img')].filter(({src}) =>
    /^data:image\/svg|\.svg$/.test(src),
  );
  images.forEach((image) => image.setAttribute('loading', 'eager'));
  await Promise.all(images.map((image) => image.decode()));
  return images.map((image) => ({
    address: image.src,
    alt: image.alt.slice(0, 40),
    width: image.getBoundingClientRect().width,
  }));
}
