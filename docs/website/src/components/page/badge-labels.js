import {translate} from '@docusaurus/Translate';

/** @param {string} device */
export function deviceLabel(device) {
  if (device === 'pretend') {
    return translate({
      id: 'site.badge.pretend',
      message: 'device discipline on a pretend accelerator, not a GPU',
    });
  }
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
