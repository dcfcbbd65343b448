import React from 'react';
import {translate} from '@docusaurus/Translate';

/** @param {string} state */
function stateLabel(state) {
  const labels = {
    works: translate({id: 'site.state.works', message: 'works'}),
    planned: translate({id: 'site.state.planned', message: 'planned'}),
    yes: translate({id: 'site.state.yes', message: 'yes'}),
    no: translate({id: 'site.state.no', message: 'no'}),
    partial: translate({id: 'site.state.partial', message: 'in part'}),
  };
  return labels[state];
}

/**
 * Whether something is there, in a word.
 *
 * @param {{state: string}} props
 */
export default function State({state}) {
  return (
    <span className="state" data-state={state}>
      {stateLabel(state)}
    </span>
  );
}
