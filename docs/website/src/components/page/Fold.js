import React from 'react';
import {translate} from '@docusaurus/Translate';

/**
 * Code that a reader need not read: what checks the page, or draws a figure.
 *
 * @param {{role: 'check' | 'figure', children: React.ReactNode}} props
 */
export default function Fold({role, children}) {
  const summaries = {
    check: translate({id: 'site.fold.check', message: 'How this page is verified'}),
    figure: translate({id: 'site.fold.figure', message: 'How this figure is drawn'}),
  };
  return (
    <details className="fold">
      <summary>{summaries[role]}</summary>
      {children}
    </details>
  );
}
