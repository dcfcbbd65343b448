import React from 'react';
import {translate} from '@docusaurus/Translate';

/** @param {string} type One of GitHub's five kinds of alert. */
function titleOf(type) {
  const titles = {
    note: translate({id: 'site.alert.note', message: 'Note'}),
    tip: translate({id: 'site.alert.tip', message: 'Tip'}),
    important: translate({id: 'site.alert.important', message: 'Important'}),
    warning: translate({id: 'site.alert.warning', message: 'Warning'}),
    caution: translate({id: 'site.alert.caution', message: 'Caution'}),
  };
  return titles[type];
}

/**
 * A remark beside the text.
 *
 * @param {{type: string, children: React.ReactNode}} props
 */
export default function Admonition({type, children}) {
  return (
    <div className="alert-box" data-type={type} role="note" aria-label={titleOf(type)}>
      <p className="alert-title">{titleOf(type)}</p>
      {children}
    </div>
  );
}
