import React, {useDeferredValue, useEffect, useState} from 'react';
import Head from '@docusaurus/Head';
import Layout from '@theme/Layout';
import Heading from '@theme/Heading';
import Link from '@docusaurus/Link';
import {useHistory, useLocation} from '@docusaurus/router';
import {translate} from '@docusaurus/Translate';
import {Found, Status, describe} from '../search/Found';
import {markNext} from '../search/marking';
import useSearch from '../search/useSearch';

/** Pages that are shown, and sections of each. */
const PAGES = 30;
const SECTIONS = 4;

/** All that the search finds, for the question in the address: `?q=OOM&version=0.1.0`. */
export default function Search() {
  const [query, setQuery] = useState('');
  const [versionName, setVersionName] = useState(undefined);
  const {pathname, search: asked} = useLocation();
  const history = useHistory();
  const {version, start, state, results, marker} = useSearch(useDeferredValue(query), versionName);
  useEffect(() => {
    const wanted = new URLSearchParams(asked);
    setQuery(wanted.get('q') ?? '');
    setVersionName(wanted.get('version') ?? undefined);
    start();
  }, [asked]);
  const onChange = ({target}) => {
    setQuery(target.value);
    history.replace(`${pathname}?${new URLSearchParams({q: target.value, version: version.name})}`);
  };
  const title = translate({id: 'site.search.title', message: 'Search'});
  return (
    <Layout title={title}>
      <Head>
        <meta name="robots" content="noindex" />
      </Head>
      <main className="container plain-page search-page">
        <Heading as="h1">{title}</Heading>
        <form onSubmit={(event) => event.preventDefault()}>
          <input
            className="search-field"
            type="search"
            autoComplete="off"
            spellCheck="false"
            aria-label={translate({id: 'site.search.label', message: 'Search the documentation'})}
            value={query}
            onChange={onChange}
          />
        </form>
        <p className="search-status" role="status">
          {query.trim() && <Status state={state} count={results.length} />}
        </p>
        <ol className="search-results">
          {results.slice(0, PAGES).map(({page, sections}) => (
            <li key={page.path}>
              {sections.slice(0, SECTIONS).map((section) => (
                <Section key={section.anchor} {...{page, section, version, marker, query}} />
              ))}
            </li>
          ))}
        </ol>
      </main>
    </Layout>
  );
}

function Section({page, section, version, marker, query}) {
  const {to, ...words} = describe({page, section, version});
  return (
    <Link className="search-result" to={to} onClick={() => markNext(query)}>
      <Found {...words} marker={marker} />
    </Link>
  );
}
