import React from 'react';
import Heading from '@theme/Heading';

/**
 * A part of the first page.
 *
 * @param {{id: string, title: string, text?: string, children: React.ReactNode}} props
 */
export default function Section({id, title, text, children}) {
  return (
    <section className="home-section" aria-labelledby={id}>
      <div className="home-section-head">
        <Heading as="h2" id={id}>
          {title}
        </Heading>
        {text && <p className="section-text">{text}</p>}
      </div>
      <div className="home-section-body">{children}</div>
    </section>
  );
}
