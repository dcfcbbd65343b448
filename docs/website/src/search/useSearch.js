import {useCallback, useEffect, useMemo, useState} from 'react';
import useBaseUrl from '@docusaurus/useBaseUrl';
import {useActiveVersion, useLatestVersion, useVersions} from '@docusaurus/plugin-content-docs/client';
import {prepare, search} from './engine.mjs';
import {markerOf} from './query.mjs';

/** What was loaded, by its address: a promise, so that two who ask at once wait for the same. */
const loaded = new Map();

/** @param {string} address */
function load(address) {
  if (!loaded.has(address)) {
    // A new build of the site keeps the address: the browser asks whether its copy still holds.
    const answer = fetch(address, {cache: 'no-cache'}).then((response) => {
      if (!response.ok) {
        throw new Error(`${address}: ${response.status}`);
      }
      return response.json();
    });
    loaded.set(address, answer.then(prepare));
    answer.catch(() => loaded.delete(address));
  }
  return loaded.get(address);
}

/**
 * The search of a version of the documentation.
 *
 * @param {string} query
 * @param {string} [name] Of the version; by default that of the page, or the latest.
 * @returns {{version: object, start: () => void, state: 'idle' | 'loading' | 'ready' | 'failed',
 *   results: import('./engine.mjs').Result[], marker: RegExp | null}} Nothing is loaded before `start`.
 */
export default function useSearch(query, name) {
  const active = useActiveVersion(undefined);
  const latest = useLatestVersion(undefined);
  const named = useVersions(undefined).find((version) => version.name === name);
  const version = named ?? active ?? latest;
  const address = useBaseUrl(`search-index/${version.name}.json`);
  const [isWanted, setWanted] = useState(false);
  const [{index, state}, setLoaded] = useState({index: null, state: 'idle'});
  useEffect(() => {
    if (!isWanted) {
      return undefined;
    }
    let isCurrent = true;
    setLoaded({index: null, state: 'loading'});
    load(address).then(
      (ready) => isCurrent && setLoaded({index: ready, state: 'ready'}),
      () => isCurrent && setLoaded({index: null, state: 'failed'}),
    );
    return () => {
      isCurrent = false;
    };
  }, [isWanted, address]);
  const results = useMemo(() => (index && query.trim() ? search(index, query) : []), [index, query]);
  const marker = useMemo(() => (index ? markerOf(query, index.synonyms) : null), [index, query]);
  return {version, start: useCallback(() => setWanted(true), []), state, results, marker};
}
