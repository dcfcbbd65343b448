import React from 'react';
import Link from '@docusaurus/Link';
import Translate from '@docusaurus/Translate';
import {useDoc} from '@docusaurus/plugin-content-docs/client';

/**
 * Says which sections of a translation are older than their original.
 *
 * @param {{sections: string[]}} props
 */
export default function StaleBanner({sections}) {
  const {toc} = useDoc();
  // Entries of the table of contents are HTML: code in a heading is a tag there.
  const words = (html) =>
    html
      .replace(/<[^>]+>/g, '')
      .replace(/&lt;/g, '<')
      .replace(/&gt;/g, '>')
      .replace(/&amp;/g, '&');
  const anchors = new Map(toc.map(({value, id}) => [words(value), id]));
  return (
    <aside className="stale-banner">
      <Translate id="site.stale.banner">
        The English original has changed since these sections were translated:
      </Translate>
      <ul>
        {sections.map((section) => (
          <li key={section}>
            {anchors.has(section) ? <Link to={`#${anchors.get(section)}`}>{section}</Link> : section}
          </li>
        ))}
      </ul>
    </aside>
  );
}
