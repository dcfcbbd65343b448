import React from 'react';
import Translate from '@docusaurus/Translate';

/**
 * What the block above printed.
 *
 * @param {{children: React.ReactNode}} props
 */
export default function Output({children}) {
  return (
    <div className="output">
      <p className="output-label">
        <Translate id="site.output" description="Label of what a code block printed">
          Output
        </Translate>
      </p>
      {children}
    </div>
  );
}
