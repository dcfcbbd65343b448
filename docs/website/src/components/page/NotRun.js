import React from 'react';
import Translate from '@docusaurus/Translate';

/**
 * A block that the tests leave out.
 *
 * @param {{reason: string, children: React.ReactNode}} props
 */
export default function NotRun({reason, children}) {
  return (
    <div className="not-run">
      <p className="not-run-tag">
        <strong>
          <Translate id="site.notRun" description="Tag of a code block that the tests leave out">
            Not run by the tests
          </Translate>
        </strong>
        {reason && <span>{reason}</span>}
      </p>
      {children}
    </div>
  );
}
