import React from 'react';
import Layout from '@theme/Layout';
import {translate} from '@docusaurus/Translate';
import landing from '@site/data/landing.json';
import Chooser from '@site/src/components/landing/Chooser.js';
import Goals from '@site/src/components/landing/Goals.js';
import Hero from '@site/src/components/landing/Hero.js';
import Measured from '@site/src/components/landing/Measured.js';
import Proof from '@site/src/components/landing/Proof.js';
import Section from '@site/src/components/landing/Section.js';

/** The first page, in three screens: what the library is for, where to go on, and what was measured. */
export default function Home() {
  return (
    <Layout
      title={translate({id: 'site.home.title', message: 'Large-scale PyTorch training'})}
      description={translate({
        id: 'site.home.description',
        message: 'Large-scale PyTorch training that anyone can learn, run and trust.',
      })}
    >
      <main className="home">
        <Hero example={landing.example} install={landing.install} />
        <div className="home-screen">
          <Section id="goals" title={translate({id: 'site.goals.title', message: 'What do you want to do?'})}>
            <Goals goals={landing.goals} />
          </Section>
          <Section
            id="chooser"
            title={translate({id: 'site.chooser.title', message: 'Which plugin?'})}
            text={translate({
              id: 'site.chooser.text',
              message: 'The plugin decides how training is parallelized. The training loop stays the same.',
            })}
          >
            <Chooser plugins={landing.plugins} />
          </Section>
        </div>
        <div className="home-screen home-columns">
          {landing.measured && <Measured measured={landing.measured} />}
          <Proof
            proof={landing.proof}
            counts={{
              features: landing.features.rows.length,
              models: landing.models.rows.length,
              tutorials: landing.tutorials.flatMap(({pages}) => pages).length,
            }}
          />
        </div>
      </main>
    </Layout>
  );
}
