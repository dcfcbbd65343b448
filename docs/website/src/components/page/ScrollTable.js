import React from 'react';
import {translate} from '@docusaurus/Translate';
import Scrollable from '../Scrollable.js';

/** A table of a page; on a narrow screen it scrolls in its own frame. */
export default function ScrollTable(props) {
  return (
    <Scrollable className="table-frame" label={translate({id: 'site.table', message: 'Table'})}>
      <table {...props} />
    </Scrollable>
  );
}
