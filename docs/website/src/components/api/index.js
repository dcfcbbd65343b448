/** The parts of the documentation of one object, which `plugins/api/writer.js` puts together. */

import React from 'react';
import {translate} from '@docusaurus/Translate';
import Link from '@docusaurus/Link';
import Scrollable from '../Scrollable.js';
import {kindLabel, partLabel, sourceTitle} from './labels.js';

/** Docstrings are written in English, whatever the language of the page. */
const ENGLISH = 'en';

/**
 * @param {{kind: string, source?: string, code?: string, children: React.ReactNode}} props
 */
export function ApiEntry({kind, source, code, children}) {
  const [signature, ...rest] = React.Children.toArray(children);
  return (
    <section className="api-entry" data-kind={kind}>
      {signature}
      {source && (
        <p className="api-source">
          {code ? (
            <Link to={code} title={sourceTitle()}>
              {source}
            </Link>
          ) : (
            source
          )}
        </p>
      )}
      <div className="api-body" lang={ENGLISH}>
        {rest}
      </div>
    </section>
  );
}

/**
 * @param {{kind: string, children: React.ReactNode}} props
 */
export function ApiSignature({kind, children}) {
  return (
    <div className="api-signature">
      <span className="api-kind">{kindLabel(kind)}</span>
      <Scrollable as="pre" label={translate({id: 'site.api.signature', message: 'Signature'})} translate="no">
        <code>{children}</code>
      </Scrollable>
    </div>
  );
}

/** @param {{children: React.ReactNode}} props */
export function ApiBases({children}) {
  return (
    <div className="api-bases">
      <span className="api-label">{partLabel('bases')}</span> {children}
    </div>
  );
}

/** @param {{children: React.ReactNode}} props */
export function ApiAlias({children}) {
  return (
    <div className="api-bases">
      <span className="api-label">{partLabel('alias')}</span> {children}
    </div>
  );
}

/** @param {{label: string, children: React.ReactNode}} props */
export function ApiPart({label, children}) {
  return (
    <div className="api-part" data-part={label}>
      <p className="api-label">{partLabel(label)}</p>
      {children}
    </div>
  );
}

/** @param {{children: React.ReactNode}} props */
export function ApiFields({children}) {
  return <dl className="api-fields">{children}</dl>;
}

/** @param {{children: React.ReactNode}} props */
export function ApiField({children}) {
  return <div className="api-field">{children}</div>;
}

/** @param {{children: React.ReactNode}} props */
export function ApiFieldHead({children}) {
  return <dt>{children}</dt>;
}

/** @param {{children: React.ReactNode}} props */
export function ApiFieldBody({children}) {
  return <dd>{children}</dd>;
}

/** @param {{children: React.ReactNode}} props */
export function ApiName({children}) {
  return <code className="api-name">{children}</code>;
}

/** @param {{children: React.ReactNode}} props */
export function ApiType({children}) {
  return <span className="api-type">{children}</span>;
}

/** @param {{children: React.ReactNode}} props */
export function ApiDefault({children}) {
  return (
    <span className="api-default">
      {translate({id: 'site.api.default', message: 'default'})} <code>{children}</code>
    </span>
  );
}
