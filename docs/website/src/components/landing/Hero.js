import React from 'react';
import CodeBlock from '@theme/CodeBlock';
import Heading from '@theme/Heading';
import Link from '@docusaurus/Link';
import Translate from '@docusaurus/Translate';
import useText from './useText.js';
import {findPage, summarise} from './status.js';

/**
 * @typedef {import('./status.js').Category} Category
 * @typedef {{source: string, page: string, command: string}} ExampleData
 */

/** @param {{example: ExampleData, tutorials: Category[]}} props */
export default function Hero({example, tutorials}) {
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
        <Summary tutorials={tutorials} />
      </div>
      <Example example={example} tutorials={tutorials} />
    </header>
  );
}

/** @param {{tutorials: Category[]}} props */
function Summary({tutorials}) {
  const {programs, verified, lastDate, onGpu} = summarise(tutorials);
  return (
    <dl className="hero-facts">
      <div>
        <dt>
          <Translate id="site.hero.verified">tutorials verified on a CPU</Translate>
        </dt>
        <dd>
          {verified}
          <span className="of"> / {programs}</span>
        </dd>
      </div>
      <div>
        <dt>
          <Translate id="site.hero.gpu">on a GPU</Translate>
        </dt>
        <dd>
          {onGpu}
          <span className="of"> / {programs}</span>
        </dd>
      </div>
      {lastDate && (
        <div>
          <dt>
            <Translate id="site.hero.lastRun">last run</Translate>
          </dt>
          <dd>
            <time dateTime={lastDate}>{lastDate}</time>
          </dd>
        </div>
      )}
    </dl>
  );
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
