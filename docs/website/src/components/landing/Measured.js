import React from 'react';
import Link from '@docusaurus/Link';
import Translate, {translate} from '@docusaurus/Translate';
import Section from './Section.js';
import useText from './useText.js';

/**
 * @typedef {{page: string, machine: string, torch: string, world: number, date: string, commit: string,
 *   rows: {key: string, label: import('./useText.js').Text, ours: number, peer: number}[]}} MeasuredData
 * Times in milliseconds, read from the record of the page's last run.
 */

/**
 * A measured result beside its peer.
 *
 * @param {{measured: MeasuredData}} props
 */
export default function Measured({measured: {page, machine, torch, world, date, commit, rows}}) {
  const text = useText();
  return (
    <Section
      id="measured"
      title={translate({id: 'site.measured.title', message: 'Faster gradient exchange on one machine'})}
      text={translate({
        id: 'site.measured.text',
        message:
          'CPU processes of one host exchange gradients through shared memory. gloo, the CPU backend of PyTorch, ' +
          'uses sockets. Both were timed in turns in the same run.',
      })}
    >
      <dl className="bars">
        {rows.map(({key, label, ours, peer}) => (
          <React.Fragment key={key}>
            <dt>{text(label)}</dt>
            <Bar name="PyTorch gloo" time={peer} longest={Math.max(ours, peer)} />
            <Bar name="colossal shm" time={ours} longest={Math.max(ours, peer)} isOurs />
          </React.Fragment>
        ))}
      </dl>
      <p className="measured-run">
        <Translate
          id="site.measured.run"
          values={{world, machine, torch, date, commit: commit.slice(0, 7), page: <PageLink page={page} />}}
        >
          {'{world} processes, {machine}, torch {torch}, {date}, commit {commit}. Measured by {page}.'}
        </Translate>
      </p>
    </Section>
  );
}

/** @param {{page: string}} props */
function PageLink({page}) {
  return (
    <Link to={`/docs/${page}`}>
      <Translate id="site.measured.page">this tutorial</Translate>
    </Link>
  );
}

/** @param {{name: string, time: number, longest: number, isOurs?: boolean}} props */
function Bar({name, time, longest, isOurs = false}) {
  return (
    <dd className="bar" data-ours={isOurs}>
      <span className="bar-name">{name}</span>
      <span className="bar-track">
        <i aria-hidden="true" style={{width: `${(100 * time) / longest}%`}} />
      </span>
      <span className="bar-time">{`${time.toFixed(1)} ms`}</span>
    </dd>
  );
}
