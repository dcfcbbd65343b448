import React from 'react';
import CodeBlock from '@theme/CodeBlock';
import Heading from '@theme/Heading';
import Link from '@docusaurus/Link';
import Translate, {translate} from '@docusaurus/Translate';
import useText from './useText.js';
import {findPage} from './pages.js';

/**
 * @typedef {import('./pages.js').Category} Category
 * @typedef {{programs: number, lastDate: string, verified: Record<string, number>}} Proof How many tutorials have code;
 *   and how many of them are verified on each kind of device on which any ran.
 * @typedef {{source: string, page: string, command: string}} ExampleData
 */

/** @param {{example: ExampleData, tutorials: Category[], proof: Proof}} props */
export default function Hero({example, tutorials, proof}) {
  const first = tutorials[0].pages[0];
  return (
    <header className="hero-grid">
      <div className="hero-words">
        <Heading as="h1">
          <Translate id="site.hero.title">Large-scale PyTorch training that anyone can learn, run and trust</Translate>
        </Heading>
        <p className="hero-lead">
          <Translate id="site.hero.lead">
            One set of verbs, the Booster, turns a single-process program into a parallel one. You keep your model, your
            optimizer and your training loop. The same code runs on a laptop and is written for GPUs.
          </Translate>
        </p>
        <p className="actions">
          <Link className="action action-first" to={`/docs/${first.name}`}>
            <Translate id="site.hero.install">Install</Translate>
          </Link>
          <Link className="action" to={`/docs/${example.page}`}>
            <Translate id="site.hero.overview">Read the overview</Translate>
          </Link>
        </p>
        <Summary proof={proof} />
      </div>
      <Example example={example} tutorials={tutorials} />
    </header>
  );
}

/**
 * What the records prove; nothing where there are none.
 *
 * @param {{proof: Proof}} props
 */
function Summary({proof: {programs, lastDate, verified}}) {
  if (!lastDate) {
    return null;
  }
  return (
    <section className="hero-proof" aria-labelledby="hero-proof">
      <p id="hero-proof">
        <Translate id="site.hero.proof">Tutorials, each of them a program</Translate>
      </p>
      <ul>
        {Object.entries(verified).map(([device, count]) => (
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
          <Translate id="site.hero.lastRun">last run</Translate>
        </li>
      </ul>
    </section>
  );
}

/** @param {string} device */
function verifiedLabel(device) {
  return device === 'cuda'
    ? translate({id: 'site.hero.gpu', message: 'verified on a GPU'})
    : translate({id: 'site.hero.verified', message: 'verified on a CPU'});
}

/** @param {{example: ExampleData, tutorials: Category[]}} props */
function Example({example, tutorials}) {
  const text = useText();
  const page = findPage(tutorials, example.page);
  return (
    <figure className="hero-example">
      <CodeBlock language="python">{example.source}</CodeBlock>
      <figcaption>
        <Translate
          id="site.hero.tested"
          values={{page: <Link to={`/docs/${example.page}`}>{page ? text(page.title) : example.page}</Link>}}
        >
          {'These lines stand in {page}, where the tests run them.'}
        </Translate>
      </figcaption>
    </figure>
  );
}
