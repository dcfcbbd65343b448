import {translate} from '@docusaurus/Translate';

/** @param {string} device */
export function deviceLabel(device) {
  return device === 'cuda' ? 'GPU' : 'CPU';
}

/**
 * @param {import('./Badge.js').BadgeData} badge
 */
export function stateLabel({state, device}) {
  const labels = {
    verified: translate({id: 'site.badge.verified', message: 'verified'}),
    outdated: translate({id: 'site.badge.outdated', message: 'code changed since the run'}),
    failed: translate({id: 'site.badge.failed', message: 'failed'}),
    none: translate({id: 'site.badge.none', message: 'no code to run'}),
    never:
      device === 'cuda'
        ? translate({id: 'site.badge.never.gpu', message: 'not run on a GPU yet'})
        : translate({id: 'site.badge.never.cpu', message: 'not run on a CPU yet'}),
  };
  return labels[state];
}
