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
      <Heading as="h2" id={id}>
        {title}
      </Heading>
      {text && <p className="section-text">{text}</p>}
      {children}
    </section>
  );
}
