import React from 'react';
import {translate} from '@docusaurus/Translate';
import landing from '@site/data/landing.json';
import ListPage from '@site/src/components/landing/ListPage.js';
import Matrix from '@site/src/components/landing/Matrix.js';

/** What each plugin can do. */
export default function Features() {
  return (
    <ListPage
      title={translate({id: 'site.features.title', message: 'Features by plugin'})}
      text={translate({
        id: 'site.features.text',
        message: 'Every cell was tried when this site was built: the plugin either ran the feature or rejected it.',
      })}
    >
      <Matrix matrix={landing.features} label={translate({id: 'site.features.label', message: 'Feature'})} />
    </ListPage>
  );
}
