import {translate} from '@docusaurus/Translate';

/** @param {string} device */
export function deviceLabel(device) {
  return device === 'cuda' ? 'GPU' : 'CPU';
}

/**
 * @param {import('./Badge.js').BadgeData} badge
 */
export function stateLabel({state, date}) {
  const labels = {
    verified: translate({id: 'site.badge.verified', message: 'verified'}),
    outdated: translate({id: 'site.badge.outdated', message: 'verified on {date}, changed since'}, {date}),
    failed: translate({id: 'site.badge.failed', message: 'failed'}),
  };
  return labels[state];
}
