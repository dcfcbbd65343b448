import React from 'react';
import {translate} from '@docusaurus/Translate';
import Image from '@theme/MDXComponents/Img';
import Scrollable from '../Scrollable.js';

/** A figure of a page; on a narrow screen its text stays readable, and it scrolls in its own frame. */
export default function ScrollFigure(props) {
  return (
    <Scrollable as="span" className="figure-frame" label={translate({id: 'site.figure', message: 'Figure'})}>
      <Image {...props} />
    </Scrollable>
  );
}
