import React, {useEffect, useRef} from 'react';
import {translate} from '@docusaurus/Translate';
import SearchBar from '@theme-original/SearchBar';

/** The search of the navigation, with its field labelled in the language of the page. */
export default function LabelledSearchBar(props) {
  const ref = useRef(null);
  useEffect(() => {
    const field = ref.current.querySelector('input');
    field.setAttribute('aria-label', translate({id: 'site.search.label', message: 'Search the documentation'}));
    return letGo(ref.current, field);
  }, []);
  return (
    <div ref={ref} role="search" className="search-bar">
      <SearchBar {...props} />
    </div>
  );
}

/**
 * The search takes the focus back when its index has been loaded. Who has moved on by keyboard in the meantime keeps
 * the focus instead.
 *
 * @param {HTMLElement} bar
 * @param {HTMLInputElement} field
 * @returns {() => void} Undoes it.
 */
function letGo(bar, field) {
  let hasLeft = false;
  const onFocusOut = ({relatedTarget}) => {
    hasLeft = relatedTarget !== null && !bar.contains(relatedTarget);
  };
  const onShortcut = ({key, ctrlKey, metaKey}) => {
    hasLeft = hasLeft && !(key === 'k' && (ctrlKey || metaKey));
  };
  field.focus = (options) => hasLeft || HTMLElement.prototype.focus.call(field, options);
  bar.addEventListener('focusout', onFocusOut);
  document.addEventListener('keydown', onShortcut, {capture: true});
  return () => {
    delete field.focus;
    bar.removeEventListener('focusout', onFocusOut);
    document.removeEventListener('keydown', onShortcut, {capture: true});
  };
}
