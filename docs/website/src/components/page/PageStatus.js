import React from 'react';
import {useDoc} from '@docusaurus/plugin-content-docs/client';
import About from './About.js';
import Badge from './Badge.js';
import Downloads from './Downloads.js';
import StaleBanner from './StaleBanner.js';

/** Below the title: what kind of page it is, when and where the page last ran, its downloads, and what its translation lacks. */
export default function PageStatus() {
  const {about, badges = [], downloads = {}, stale = []} = useDoc().frontMatter.page ?? {};
  return (
    <>
      {(about || badges.length > 0 || Object.keys(downloads).length > 0) && (
        <div className="page-status">
          <div>
            {about && <About about={about} />}
            {badges.length > 0 && (
              <ul className="badges">
                {badges.map((badge) => (
                  <li key={badge.device}>
                    <Badge badge={badge} />
                  </li>
                ))}
              </ul>
            )}
          </div>
          <Downloads downloads={downloads} />
        </div>
      )}
      {stale.length > 0 && <StaleBanner sections={stale} />}
    </>
  );
}
