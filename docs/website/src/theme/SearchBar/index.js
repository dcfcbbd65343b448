import React, {useDeferredValue, useEffect, useRef, useState} from 'react';
import Link from '@docusaurus/Link';
import {useHistory} from '@docusaurus/router';
import Translate, {translate} from '@docusaurus/Translate';
import useBaseUrl from '@docusaurus/useBaseUrl';
import {Found, Status, describe} from '../../search/Found';
import {markNext} from '../../search/marking';
import useSearch from '../../search/useSearch';

/** Pages that the list below the field shows. */
const SHOWN = 7;
const LIST = 'search-list';

/** The search of the navigation: a field, and below it the pages that were found, the best chosen already. */
export default function SearchBar() {
  const field = useRef(null);
  const [query, setQuery] = useState('');
  const [isOpen, setOpen] = useState(false);
  const [chosen, setChosen] = useState(0);
  const history = useHistory();
  const {version, start, state, results, marker} = useSearch(useDeferredValue(query));
  const all = `${useBaseUrl('search/')}?${new URLSearchParams({q: query, version: version.name})}`;
  const found = results.slice(0, SHOWN).map(({page, sections: [section]}) => describe({page, section, version}));
  const targets = [...found.map(({to}) => to), all];
  const isShown = isOpen && query.trim() !== '';
  useShortcut(field);
  useEffect(() => {
    document.getElementById(`${LIST}-${chosen}`)?.scrollIntoView({block: 'nearest'});
  }, [chosen]);

  const leave = (to) => {
    markNext(query);
    setOpen(false);
    field.current.blur();
    history.push(to);
  };
  const onKeyDown = (event) => {
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (event.nativeEvent.isComposing) {
      // A key that chooses Chinese characters chooses no result.
    } else if (step && query) {
      event.preventDefault();
      setOpen(true);
      setChosen((chosen + step + targets.length) % targets.length);
    } else if (event.key === 'Enter' && query.trim()) {
      event.preventDefault();
      leave(isOpen ? targets[Math.min(chosen, targets.length - 1)] : all);
    } else if (event.key === 'Escape' && isShown) {
      // The browser would clear the field.
      event.preventDefault();
      setOpen(false);
    } else if (event.key === 'Escape') {
      field.current.blur();
    }
  };
  const onChange = ({target}) => {
    setQuery(target.value);
    setOpen(true);
    setChosen(0);
  };
  const option = (at) => ({
    id: `${LIST}-${at}`,
    role: 'option',
    tabIndex: -1,
    'aria-selected': at === chosen,
    className: `search-option ${at === chosen ? 'search-option-chosen' : ''}`,
    onMouseMove: () => setChosen(at),
    onClick: () => {
      markNext(query);
      setOpen(false);
      field.current.blur();
    },
  });
  return (
    <div role="search" className="search-bar" onBlur={(event) => leavesTo(event) && setOpen(false)}>
      <input
        ref={field}
        className="navbar__search-input"
        type="search"
        role="combobox"
        autoComplete="off"
        spellCheck="false"
        aria-autocomplete="list"
        aria-expanded={isShown}
        aria-controls={LIST}
        aria-activedescendant={isShown ? `${LIST}-${chosen}` : undefined}
        aria-keyshortcuts="Control+K Meta+K"
        aria-label={translate({id: 'site.search.label', message: 'Search the documentation'})}
        placeholder={translate({id: 'site.search.placeholder', message: 'Search'})}
        value={query}
        onChange={onChange}
        onFocus={() => {
          start();
          setOpen(true);
        }}
        onKeyDown={onKeyDown}
      />
      <Shortcut />
      <div
        className="search-panel"
        hidden={!isShown}
        // A click would take the focus from the field, which closes the list before it is clicked.
        onMouseDown={(event) => event.preventDefault()}
      >
        <p className="search-status" role="status">
          <Status state={state} count={results.length} />
        </p>
        <div id={LIST} role="listbox" aria-label={translate({id: 'site.search.results', message: 'Search results'})}>
          {isShown &&
            found.map(({to, ...words}, at) => (
              <Link key={to} to={to} {...option(at)}>
                <Found {...words} marker={marker} />
              </Link>
            ))}
          {isShown && (
            <Link to={all} {...option(found.length)}>
              <Translate id="site.search.all">All results</Translate>
            </Link>
          )}
        </div>
      </div>
    </div>
  );
}

/** Whether the focus goes elsewhere than within the element. @param {React.FocusEvent} event */
const leavesTo = ({currentTarget, relatedTarget}) => !currentTarget.contains(relatedTarget);

/** The keys that lead to the search, as the reader's keyboard names them. */
function Shortcut() {
  const [isMac, setMac] = useState(false);
  useEffect(() => setMac(/mac|iphone|ipad/i.test(navigator.platform)), []);
  return (
    <kbd className="search-shortcut" aria-hidden="true">
      {isMac ? '⌘ K' : 'Ctrl K'}
    </kbd>
  );
}

/** @param {React.RefObject<HTMLInputElement>} field Takes the focus on Ctrl+K. */
function useShortcut(field) {
  useEffect(() => {
    const onKeyDown = (event) => {
      if (event.key.toLowerCase() === 'k' && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        field.current.focus();
        field.current.select();
      }
    };
    document.addEventListener('keydown', onKeyDown);
    return () => document.removeEventListener('keydown', onKeyDown);
  }, []);
}
