import React from 'react';
import Link from '@docusaurus/Link';
import Translate, {translate} from '@docusaurus/Translate';
import Section from './Section.js';

/**
 * @typedef {{programs: number, lastDate: string, verified: Record<string, number>}} Proof How many tutorials have code;
 *   and how many of them are verified on each kind of device on which any ran.
 */

/**
 * What the records prove, as far as there are any, and where the complete lists are.
 *
 * @param {{proof: Proof, counts: {features: number, models: number, tutorials: number}}} props
 */
export default function Proof({proof, counts}) {
  return (
    <Section
      id="proof"
      title={translate({id: 'site.proof.title', message: 'Every tutorial is a program that the tests run'})}
    >
      <Verified proof={proof} />
      <p className="actions">
        <Link className="action" to="/features">
          <Translate id="site.proof.features" values={{count: counts.features}}>
            {'{count} features by plugin'}
          </Translate>
        </Link>
        <Link className="action" to="/models">
          <Translate id="site.proof.models" values={{count: counts.models}}>
            {'{count} model families'}
          </Translate>
        </Link>
        <Link className="action" to="/tutorials">
          <Translate id="site.proof.tutorials" values={{count: counts.tutorials}}>
            {'All {count} tutorials'}
          </Translate>
        </Link>
      </p>
    </Section>
  );
}

/** @param {{proof: Proof}} props */
function Verified({proof: {programs, lastDate, verified}}) {
  const counts = Object.entries(verified).filter(([, count]) => count > 0);
  if (counts.length === 0) {
    return null;
  }
  return (
    <>
      <ul className="proof">
        {counts.map(([device, count]) => (
          <li key={device}>
            <strong>
              {count}
              <span className="of"> / {programs}</span>
            </strong>{' '}
            {verifiedLabel(device)}
          </li>
        ))}
        <li>
          <strong>
            <time dateTime={lastDate}>{lastDate}</time>
          </strong>{' '}
          <Translate id="site.proof.lastRun">last run</Translate>
        </li>
      </ul>
      {!verified.cuda && (
        <p className="section-text">
          <Translate id="site.proof.noGpu">No tutorial has been verified on a GPU yet.</Translate>
        </p>
      )}
    </>
  );
}

/** @param {string} device */
function verifiedLabel(device) {
  return device === 'cuda'
    ? translate({id: 'site.proof.gpu', message: 'tutorials verified on a GPU'})
    : translate({id: 'site.proof.cpu', message: 'tutorials verified on a CPU'});
}
