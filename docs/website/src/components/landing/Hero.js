import React from 'react';
import CodeBlock from '@theme/CodeBlock';
import Heading from '@theme/Heading';
import Link from '@docusaurus/Link';
import Translate from '@docusaurus/Translate';

/**
 * What the library is for, how to install it, and a program to start from.
 *
 * @param {{example: {source: string, page: string, command: string}, install: {command: string, page: string}}} props
 */
export default function Hero({example, install}) {
  return (
    <header className="hero-grid">
      <div className="hero-words">
        <Heading as="h1">
          <Translate id="site.hero.title">Train PyTorch models on many devices, with your own loop</Translate>
        </Heading>
        <p className="hero-lead">
          <Translate id="site.hero.lead">
            colossal splits training over processes and GPUs by data, ZeRO, tensor, pipeline and sequence parallelism.
            Your model, optimizer and training loop stay; to split the work differently, change one line, the plugin.
          </Translate>
        </p>
        <p className="eyebrow">
          <Translate id="site.hero.clone">In a clone of the repository</Translate>
        </p>
        <CodeBlock language="shell">{install.command}</CodeBlock>
        <p className="actions">
          <Link className="action action-first" to={`/docs/${install.page}`}>
            <Translate id="site.hero.install">Installation</Translate>
          </Link>
          <Link className="action" to={`/docs/${example.page}`}>
            <Translate id="site.hero.overview">Overview</Translate>
          </Link>
        </p>
      </div>
      <figure className="hero-example">
        <CodeBlock language="python">{example.source}</CodeBlock>
        <CodeBlock language="shell">{example.command}</CodeBlock>
        <figcaption>
          <Translate
            id="site.hero.tested"
            values={{
              file: <code>train.py</code>,
              page: (
                <Link to={`/docs/${example.page}`}>
                  <Translate id="site.hero.page">overview</Translate>
                </Link>
              ),
            }}
          >
            {'Save it as {file} and run the command. The tests run this program as part of the {page}.'}
          </Translate>
        </figcaption>
      </figure>
    </header>
  );
}
