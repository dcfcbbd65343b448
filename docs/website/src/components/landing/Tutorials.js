import React from 'react';
import Link from '@docusaurus/Link';
import useDocusaurusContext from '@docusaurus/useDocusaurusContext';
import {deviceLabel, stateLabel} from '../page/badge-labels.js';
import useText from './useText.js';

/**
 * @typedef {import('../page/Badge.js').BadgeData} BadgeData
 * @typedef {import('./useText.js').Text} Text
 * @typedef {{name: string, title: Text, description: Text, badges: Record<string, BadgeData[]>}} Tutorial
 * @typedef {{label: Text, pages: Tutorial[]}} Category
 */

/**
 * All tutorials, in their order, with the state of each.
 *
 * @param {{tutorials: import('./Tutorials.js').Category[]}} props
 */
export default function Tutorials({tutorials}) {
  const text = useText();
  return (
    <div className="tutorials">
      {tutorials.map((category) => (
        <section key={category.label.en}>
          <h2>{text(category.label)}</h2>
          <ul>
            {category.pages.map((page) => (
              <Tutorial key={page.name} page={page} />
            ))}
          </ul>
        </section>
      ))}
    </div>
  );
}

/** @param {{page: import('./Tutorials.js').Tutorial}} props */
function Tutorial({page}) {
  const text = useText();
  const {currentLocale} = useDocusaurusContext().i18n;
  return (
    <li>
      <Link to={`/docs/${page.name}`}>{text(page.title)}</Link>
      <p>{text(page.description)}</p>
      {page.badges[currentLocale].length > 0 && (
        <ul className="tutorial-states">
          {page.badges[currentLocale].map((badge) => (
            <li key={badge.device} className="badge-line" data-state={badge.state}>
              <span className="badge-dot" aria-hidden="true" />
              {deviceLabel(badge.device)} <span>{badge.state === 'verified' ? badge.date : stateLabel(badge)}</span>
            </li>
          ))}
        </ul>
      )}
    </li>
  );
}
