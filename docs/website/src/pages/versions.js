import React from 'react';
import Layout from '@theme/Layout';
import Heading from '@theme/Heading';
import Link from '@docusaurus/Link';
import Translate, {translate} from '@docusaurus/Translate';
import {useVersions} from '@docusaurus/plugin-content-docs/client';

/** All versions of the documentation. */
export default function Versions() {
  const versions = useVersions();
  const released = versions.filter(({name}) => name !== 'current');
  const current = versions.find(({name}) => name === 'current');
  return (
    <Layout
      title={translate({id: 'site.versions.title', message: 'Versions'})}
      description={translate({id: 'site.versions.description', message: 'All versions of the documentation'})}
    >
      <main className="container plain-page">
        <Heading as="h1">
          <Translate id="site.versions.title">Versions</Translate>
        </Heading>
        <p>
          <Translate id="site.versions.text">
            The pages of a released version are frozen with their code and their API; the newest pages follow the main
            branch.
          </Translate>
        </p>
        <ul className="version-list">
          {current && (
            <Version version={current} note={<Translate id="site.versions.main">the main branch</Translate>} />
          )}
          {released.map((version) => (
            <Version key={version.name} version={version} />
          ))}
        </ul>
        {released.length === 0 && (
          <p>
            <Translate id="site.versions.none">No version has been released yet.</Translate>
          </p>
        )}
      </main>
    </Layout>
  );
}

/**
 * @param {{version: import('@docusaurus/plugin-content-docs/client').GlobalVersion, note?: React.ReactNode}} props
 */
function Version({version, note}) {
  const entry = version.docs.find(({id}) => id === version.mainDocId);
  return (
    <li>
      <Link to={entry.path}>{version.label}</Link> {note}
    </li>
  );
}
