import React, {useEffect, useRef} from 'react';
import {translate} from '@docusaurus/Translate';
import SearchBar from '@theme-original/SearchBar';

/** The search of the navigation, with its field labelled in the language of the page. */
export default function LabelledSearchBar(props) {
  const ref = useRef(null);
  useEffect(() => {
    const label = translate({id: 'site.search.label', message: 'Search the documentation'});
    ref.current.querySelector('input').setAttribute('aria-label', label);
  }, []);
  return (
    <div ref={ref} role="search" className="search-bar">
      <SearchBar {...props} />
    </div>
  );
}
