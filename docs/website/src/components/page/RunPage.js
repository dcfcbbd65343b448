import React from 'react';
import CodeBlock from '@theme/CodeBlock';
import Translate from '@docusaurus/Translate';
import {useDoc} from '@docusaurus/plugin-content-docs/client';
import Downloads from './Downloads.js';

/**
 * How the reader runs the page: its script, and the command that the tests use.
 *
 * @param {{command: string}} props
 */
export default function RunPage({command}) {
  const {downloads = {}} = useDoc().frontMatter.page ?? {};
  return (
    <section className="run-page">
      <p className="run-page-title">
        <Translate id="site.run.title">Run this page</Translate>
      </p>
      <p>
        <Translate id="site.run.text">
          The Python blocks above are one program. Download it, and start it with the command of the tests:
        </Translate>
      </p>
      <CodeBlock language="shell">{command}</CodeBlock>
      <Downloads downloads={downloads} />
    </section>
  );
}
