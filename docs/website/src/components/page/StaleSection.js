import React from 'react';
import Translate from '@docusaurus/Translate';

/** Below the heading of a section that is older than its original. */
export default function StaleSection() {
  return (
    <p className="stale-section">
      <Translate id="site.stale.section">
        The English text of this section has changed since it was translated.
      </Translate>
    </p>
  );
}
