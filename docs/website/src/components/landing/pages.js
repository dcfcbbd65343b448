/** The tutorials of the landing page. */

/**
 * @typedef {import('../page/Badge.js').BadgeData} BadgeData
 * @typedef {import('./useText.js').Text} Text
 * @typedef {{name: string, title: Text, description: Text, badges: Record<string, BadgeData[]>}} Tutorial
 * @typedef {{label: Text, pages: Tutorial[]}} Category
 */

/**
 * @param {Category[]} tutorials
 * @param {string} name
 */
export function findPage(tutorials, name) {
  return tutorials.flatMap(({pages}) => pages).find((page) => page.name === name);
}
