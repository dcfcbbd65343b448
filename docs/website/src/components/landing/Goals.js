import React from 'react';
import Link from '@docusaurus/Link';
import useText from './useText.js';

/**
 * What readers come for, with the page that each goal leads to.
 *
 * @param {{goals: {key: string, page: string, label: import('./useText.js').Text,
 *   text: import('./useText.js').Text}[]}} props
 */
export default function Goals({goals}) {
  const text = useText();
  return (
    <ul className="goals">
      {goals.map(({key, page, label, text: words}) => (
        <li key={key}>
          <Link className="goal" to={`/docs/${page}`}>
            <strong>{text(label)}</strong>
            <span>{text(words)}</span>
          </Link>
        </li>
      ))}
    </ul>
  );
}
