import React from 'react';
import Translate from '@docusaurus/Translate';
import {useDoc} from '@docusaurus/plugin-content-docs/client';

/**
 * What the block above printed; what was recorded says when and where.
 *
 * @param {{kind?: 'recorded', children: React.ReactNode}} props
 */
export default function Output({kind, children}) {
  return (
    <div className="output">
      <p className="output-label">
        <Translate id="site.output" description="Label of what a code block printed">
          Output
        </Translate>
        {kind === 'recorded' && <Recorded />}
      </p>
      {children}
    </div>
  );
}

/** When and where the page's outputs and figures were recorded; nothing if its run is not. */
export function Recorded({className = 'output-run'}) {
  const {recorded} = useDoc().frontMatter.page;
  if (!recorded) return null;
  const {date, machine} = recorded;
  return (
    <span className={className}>
      <Translate
        id="site.output.recorded"
        description="When and where an output was recorded"
        values={{date: <time dateTime={date}>{date}</time>, machine}}
      >
        {'recorded {date}, {machine}'}
      </Translate>
    </span>
  );
}
