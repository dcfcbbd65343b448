import React from 'react';
import Translate, {translate} from '@docusaurus/Translate';
import {deviceLabel, stateLabel} from './badge-labels.js';

/** Characters of a commit that tell it from the others. */
const SHORT = 7;

/**
 * @typedef {{device: string, state: 'verified' | 'outdated' | 'failed', date?: string, commit?: string,
 *   processor?: string, backend?: string, world?: number, seconds?: number}} BadgeData
 */

/**
 * What is known about the page on one kind of device.
 *
 * @param {{badge: BadgeData}} props
 */
export default function Badge({badge}) {
  return (
    <span className="badge-line" data-state={badge.state}>
      <span className="badge-dot" aria-hidden="true" />
      <strong className="badge-device">{deviceLabel(badge.device)}</strong>
      <span className="badge-state">{stateLabel(badge)}</span>
      {badge.date && <BadgeFacts badge={badge} />}
    </span>
  );
}

/** @param {{badge: BadgeData}} props */
function BadgeFacts({badge: {date, state, commit, processor, backend, world, seconds}}) {
  return (
    <span className="badge-facts">
      {state !== 'outdated' && <time dateTime={date}>{date}</time>}
      {commit && (
        <span title={commit}>
          <Translate id="site.badge.commit" values={{commit: shorten(commit)}}>
            {'commit {commit}'}
          </Translate>
        </span>
      )}
      {processor && <span>{processor}</span>}
      {backend && <span>{backend}</span>}
      {world > 0 && <span>{worldLabel(world)}</span>}
      {seconds !== undefined && seconds !== null && (
        <span>
          <Translate id="site.badge.seconds" values={{seconds: seconds.toFixed(1)}}>
            {'{seconds} s'}
          </Translate>
        </span>
      )}
    </span>
  );
}

/**
 * The first characters of a commit, and whether the tree held changes that are not part of it.
 *
 * @param {string} commit
 */
const shorten = (commit) => commit.slice(0, SHORT) + (commit.endsWith('-dirty') ? '+' : '');

/** @param {number} world */
function worldLabel(world) {
  return world === 1
    ? translate({id: 'site.badge.world.one', message: '1 process'})
    : translate({id: 'site.badge.world.many', message: '{world} processes'}, {world});
}
