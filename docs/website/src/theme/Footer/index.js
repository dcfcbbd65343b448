import React from 'react';
import Link from '@docusaurus/Link';
import Translate, {translate} from '@docusaurus/Translate';
import useDocusaurusContext from '@docusaurus/useDocusaurusContext';

const LICENSE = 'Apache-2.0';

/** The foot of every page: what was built, from which state of the code. */
export default function Footer() {
  const {site} = useDocusaurusContext().siteConfig.customFields;
  const commit = site.commit.slice(0, 7);
  return (
    <footer className="site-footer">
      <div className="site-footer-row">
        <span>
          <Translate id="site.footer.license" values={{license: LICENSE}}>
            {'The colossal authors, {license}'}
          </Translate>
        </span>
        <nav aria-label={translate({id: 'site.footer.label', message: 'Further pages'})}>
          <Link to="/docs/get_started/installation">
            <Translate id="site.footer.install">Installation</Translate>
          </Link>
          <Link to="/docs/get_started/reading_roadmap">
            <Translate id="site.footer.roadmap">Reading roadmap</Translate>
          </Link>
          <Link to="/features">
            <Translate id="site.footer.features">Features</Translate>
          </Link>
          <Link to="/models">
            <Translate id="site.footer.models">Models</Translate>
          </Link>
          <Link to="/tutorials">
            <Translate id="site.footer.tutorials">Tutorials</Translate>
          </Link>
          <Link to="/versions">
            <Translate id="site.footer.versions">Versions</Translate>
          </Link>
          {site.repository && (
            <Link to={site.repository}>
              <Translate id="site.footer.source">Source</Translate>
            </Link>
          )}
        </nav>
        <span>
          <Translate id="site.footer.build" values={{version: site.version, commit, date: site.date}}>
            {'Built from {version}, commit {commit}, {date}'}
          </Translate>
        </span>
      </div>
    </footer>
  );
}
