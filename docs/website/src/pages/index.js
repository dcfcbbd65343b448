import React from 'react';
import Layout from '@theme/Layout';
import {translate} from '@docusaurus/Translate';
import landing from '@site/data/landing.json';
import Chooser from '@site/src/components/landing/Chooser.js';
import Figure from '@site/src/components/landing/Figure.js';
import Hero from '@site/src/components/landing/Hero.js';
import Matrix from '@site/src/components/landing/Matrix.js';
import Section from '@site/src/components/landing/Section.js';
import Tutorials from '@site/src/components/landing/Tutorials.js';

/** The first page. What it says about plugins, models and tutorials is data that the build reads from the code. */
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
        <Hero example={landing.example} tutorials={landing.tutorials} proof={landing.proof} />
        <Section
          id="step"
          title={translate({id: 'site.step.title', message: 'More processes, the same step'})}
          text={translate({
            id: 'site.step.text',
            message:
              'Each process reads its part of the batch. The gradients are averaged while the backward pass runs, so ' +
              'that all processes make the same step: the one that a single process would make.',
          })}
        >
          <Figure />
        </Section>
        <Section
          id="chooser"
          title={translate({id: 'site.chooser.title', message: 'Which plugin?'})}
          text={translate({
            id: 'site.chooser.text',
            message:
              'The plugin is the recipe of parallelism. Three answers choose it; the training loop does not change.',
          })}
        >
          <Chooser plugins={landing.plugins} />
        </Section>
        <Section
          id="features"
          title={translate({id: 'site.features.title', message: 'What works, and what is planned'})}
          text={translate({
            id: 'site.features.text',
            message: 'This table is made from the code when the site is built.',
          })}
        >
          <Matrix matrix={landing.features} label={translate({id: 'site.features.label', message: 'Feature'})} />
        </Section>
        <Section
          id="models"
          title={translate({id: 'site.models.title', message: 'Models'})}
          text={translate({
            id: 'site.models.text',
            message:
              'Data-parallel plugins take any torch.nn.Module as it is. Layers are divided, and cut into stages, by a ' +
              'table for each family of models. When this site was built, a small model of each was compared with itself.',
          })}
        >
          <Matrix matrix={landing.models} label={translate({id: 'site.models.label', message: 'Model'})} />
        </Section>
        <Section
          id="tutorials"
          title={translate({id: 'site.tutorials.title', message: 'Tutorials, and how they ran'})}
          text={translate({
            id: 'site.tutorials.text',
            message:
              'Every page with code is a program. A dot tells how its last run ended on each kind of device where it ' +
              'ran, and turns grey when the code has changed since.',
          })}
        >
          <Tutorials tutorials={landing.tutorials} />
        </Section>
      </main>
    </Layout>
  );
}
