/** What the runs of the tutorials say together. */

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

/**
 * Both languages of a tutorial have the same code; the English run stands for it.
 *
 * @param {Category[]} tutorials
 */
export function summarise(tutorials) {
  const badges = tutorials.flatMap(({pages}) => pages.flatMap((page) => page.badges.en));
  const count = (device, state) => badges.filter((badge) => badge.device === device && badge.state === state).length;
  return {
    programs: badges.filter(({device, state}) => device === 'cpu' && state !== 'none').length,
    verified: count('cpu', 'verified'),
    onGpu: count('cuda', 'verified'),
    lastDate: badges
      .map(({date}) => date ?? '')
      .sort()
      .at(-1),
  };
}
