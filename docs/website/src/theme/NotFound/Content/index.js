import React from 'react';
import Link from '@docusaurus/Link';
import Translate from '@docusaurus/Translate';
import Heading from '@theme/Heading';

/** What stands on the page for addresses that do not exist. */
export default function NotFoundContent() {
  return (
    <main className="container not-found">
      <p className="eyebrow">404</p>
      <Heading as="h1">
        <Translate id="site.notFound.title">Page not found</Translate>
      </Heading>
      <p>
        <Translate id="site.notFound.text">
          The address may be mistyped, or the page has moved. Use the search above to find it.
        </Translate>
      </p>
      <p className="actions">
        <Link className="action action-first" to="/">
          <Translate id="site.notFound.home">Home</Translate>
        </Link>
        <Link className="action" to="/docs/get_started/reading_roadmap">
          <Translate id="site.notFound.roadmap">Reading roadmap</Translate>
        </Link>
      </p>
    </main>
  );
}
