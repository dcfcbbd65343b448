import React from 'react';
import {useDoc} from '@docusaurus/plugin-content-docs/client';
import Badge from './Badge.js';
import Downloads from './Downloads.js';
import StaleBanner from './StaleBanner.js';

/** Below the title: when and where the page last ran, its downloads, and what its translation lacks. */
export default function PageStatus() {
  const {badges = [], downloads = {}, stale = []} = useDoc().frontMatter.page ?? {};
  return (
    <>
      {(badges.length > 0 || downloads.script) && (
        <div className="page-status">
          {badges.length > 0 && (
            <ul className="badges">
              {badges.map((badge) => (
                <li key={badge.device}>
                  <Badge badge={badge} />
                </li>
              ))}
            </ul>
          )}
          <Downloads downloads={downloads} />
        </div>
      )}
      {stale.length > 0 && <StaleBanner sections={stale} />}
    </>
  );
}
