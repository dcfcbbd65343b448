import React from 'react';
import CodeBlock from '@theme/CodeBlock';
import Link from '@docusaurus/Link';
import Translate from '@docusaurus/Translate';
import State from './State.js';
import useText from './useText.js';

const DEVICES = {cpu: 'CPU', cuda: 'GPU'};

/**
 * A plugin, and how to write it.
 *
 * @param {{plugin: import('./Chooser.js').PluginData}} props
 */
export default function Recommendation({plugin}) {
  const text = useText();
  return (
    <div className="plugin-card">
      <p className="plugin-name">
        <code>{plugin.name}</code> <State state={plugin.state} />
      </p>
      <p>{text(plugin.text)}</p>
      <CodeBlock language="python">{plugin.code}</CodeBlock>
      {plugin.state === 'works' && (
        <p className="plugin-facts">
          <span>{plugin.devices.map((device) => DEVICES[device] ?? device).join(', ')}</span>
          <span>{plugin.precisions.join(', ')}</span>
          {plugin.page && (
            <Link to={`/docs/${plugin.page}`}>
              <Translate id="site.plugin.tutorial">Tutorial</Translate>
            </Link>
          )}
        </p>
      )}
    </div>
  );
}
