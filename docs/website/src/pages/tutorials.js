import React from 'react';
import {translate} from '@docusaurus/Translate';
import landing from '@site/data/landing.json';
import ListPage from '@site/src/components/landing/ListPage.js';
import Tutorials from '@site/src/components/landing/Tutorials.js';

/** All tutorials. */
export default function AllTutorials() {
  return (
    <ListPage
      title={translate({id: 'site.tutorials.title', message: 'All tutorials'})}
      text={translate({
        id: 'site.tutorials.text',
        message:
          'Every page with code is a program. A dot shows how its last run ended on each kind of device; it turns gray ' +
          'when the code has changed since.',
      })}
    >
      <Tutorials tutorials={landing.tutorials} />
    </ListPage>
  );
}
