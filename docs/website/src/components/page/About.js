import React from 'react';
import {translate} from '@docusaurus/Translate';
import {deviceLabel} from './badge-labels.js';

/**
 * What kind of page this is, how long it takes to read, and on which devices it runs.
 *
 * @param {{about: {kind: string, minutes: number, devices: string[]}}} props
 */
export default function About({about: {kind, minutes, devices}}) {
  const separator = translate({id: 'site.about.separator', message: ', ', description: 'Between two devices'});
  const facts = [
    kindLabel(kind),
    translate({id: 'site.about.minutes', message: '{minutes} min'}, {minutes}),
    devices.map(deviceLabel).join(separator),
  ];
  return <p className="page-about">{facts.join(' · ')}</p>;
}

/** @param {string} kind */
function kindLabel(kind) {
  const labels = {
    tutorial: translate({id: 'site.about.tutorial', message: 'Tutorial'}),
    'how-to': translate({id: 'site.about.howTo', message: 'How-to'}),
    concept: translate({id: 'site.about.concept', message: 'Concept'}),
    internals: translate({id: 'site.about.internals', message: 'Internals'}),
  };
  return labels[kind];
}
