import React from 'react';
import Layout from '@theme/Layout';
import Heading from '@theme/Heading';

/**
 * A page that lists what is there.
 *
 * @param {{title: string, text: string, children: React.ReactNode}} props
 */
export default function ListPage({title, text, children}) {
  return (
    <Layout title={title} description={text}>
      <main className="home list-page">
        <Heading as="h1">{title}</Heading>
        <p className="section-text">{text}</p>
        {children}
      </main>
    </Layout>
  );
}
