import React from 'react';
import Translate from '@docusaurus/Translate';
import {useBaseUrlUtils} from '@docusaurus/useBaseUrl';

/**
 * Links to the page as a script, as what it does in a shell, and as a notebook. They are plain links, because the files are no pages of the site.
 *
 * @param {{downloads: {script?: string, shell?: string, notebook?: string}}} props
 */
export default function Downloads({downloads}) {
  const {withBaseUrl} = useBaseUrlUtils();
  if (Object.keys(downloads).length === 0) {
    return null;
  }
  return (
    <span className="downloads">
      {downloads.script && (
        <a href={withBaseUrl(downloads.script)} download>
          <Translate id="site.download.script">Script</Translate>
        </a>
      )}
      {downloads.shell && (
        <a href={withBaseUrl(downloads.shell)} download>
          <Translate id="site.download.shell">Shell script</Translate>
        </a>
      )}
      {downloads.notebook && (
        <a href={withBaseUrl(downloads.notebook)} download>
          <Translate id="site.download.notebook">Notebook</Translate>
        </a>
      )}
    </span>
  );
}
