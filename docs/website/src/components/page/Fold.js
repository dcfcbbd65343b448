import React from 'react';
import {translate} from '@docusaurus/Translate';
import {Recorded} from './Output.js';

/**
 * What a reader need not read: code that checks the page or draws a figure, and the reference of an object.
 *
 * @param {{role: 'check' | 'figure' | 'api', name?: string, children: React.ReactNode}} props
 */
export default function Fold({role, name, children}) {
  const summaries = {
    check: translate({id: 'site.fold.check', message: 'How this page is verified'}),
    figure: translate({id: 'site.fold.figure', message: 'How this figure is drawn'}),
  };
  return (
    <details className="fold">
      <summary>
        {role === 'api' ? <code>{name}</code> : summaries[role]}
        {role === 'figure' && ' '}
        {role === 'figure' && <Recorded className="figure-run" />}
      </summary>
      {children}
    </details>
  );
}
