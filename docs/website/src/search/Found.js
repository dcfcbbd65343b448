import React from 'react';
import Translate, {translate} from '@docusaurus/Translate';
import {isObject} from './engine.mjs';
import {excerptOf, partsOf} from './excerpt.mjs';

/**
 * Where a section that was found stands, and what it is called.
 *
 * @param {{page: object, section: object, version: {path: string}}} found
 * @returns {{to: string, name: string, place: string, isCode: boolean, text: string}}
 */
export function describe({page, section, version}) {
  const {kind, anchor, heading, text} = section;
  const isCode = isObject(kind);
  const path = [version.path.replace(/\/$/, ''), page.path, ''].filter((part, at) => part || at === 2).join('/');
  const reference = translate({id: 'site.search.reference', message: 'API'});
  // A member is called with its class: `Booster.boost`.
  const name = isCode ? anchor.split('.').slice(-kind).join('.') : heading;
  const place = [page.isReference ? reference : '', anchor ? page.title : ''].filter(Boolean).join(' · ');
  return {to: anchor ? `${path}#${anchor}` : path, name, place, isCode, text};
}

/**
 * A section that was found: its name, its page, and some of its words.
 *
 * @param {{name: string, place: string, isCode: boolean, text: string, marker: RegExp | null}} props
 */
export function Found({name, place, isCode, text, marker}) {
  const Name = isCode ? 'code' : 'span';
  return (
    <>
      <span className="found-head">
        <Name className="found-name">
          <Marked text={name} marker={marker} />
        </Name>
        {place && <span className="found-place">{place}</span>}
      </span>
      {text && (
        <span className="found-text">
          <Marked text={excerptOf(text, isCode ? null : marker)} marker={marker} />
        </span>
      )}
    </>
  );
}

/** @param {{text: string, marker: RegExp | null}} props */
function Marked({text, marker}) {
  return partsOf(text, marker).map(({words, isFound}, at) =>
    isFound ? <mark key={at}>{words}</mark> : <React.Fragment key={at}>{words}</React.Fragment>,
  );
}

/**
 * What stands in the place of results when there are none.
 *
 * @param {{state: string, count: number}} props
 */
export function Status({state, count}) {
  if (state === 'failed') {
    return <Translate id="site.search.failed">The search could not be loaded.</Translate>;
  }
  if (state !== 'ready') {
    return <Translate id="site.search.loading">Loading …</Translate>;
  }
  return count === 0 ? <Translate id="site.search.nothing">Nothing was found.</Translate> : null;
}
