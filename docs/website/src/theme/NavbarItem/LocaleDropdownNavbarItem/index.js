import React from 'react';
import useBaseUrl from '@docusaurus/useBaseUrl';
import useRouteContext from '@docusaurus/useRouteContext';
import {Route} from 'react-router-dom';
import LocaleDropdown from '@theme-original/NavbarItem/LocaleDropdownNavbarItem';

/** Docusaurus' name of the route for addresses without a page. */
const NOT_FOUND = 'native';

/** The language menu; where there is no page, it leads to the first page of each language. */
export default function LanguageMenu(props) {
  const home = useBaseUrl('/');
  if (useRouteContext().plugin.name !== NOT_FOUND) {
    return <LocaleDropdown {...props} />;
  }
  return (
    <Route location={{pathname: home, search: '', hash: ''}}>
      <LocaleDropdown {...props} />
    </Route>
  );
}
