import React from 'react';
import {translate} from '@docusaurus/Translate';
import landing from '@site/data/landing.json';
import ListPage from '@site/src/components/landing/ListPage.js';
import Matrix from '@site/src/components/landing/Matrix.js';

/** The families of models that layers are sharded and stages are partitioned for. */
export default function Models() {
  return (
    <ListPage
      title={translate({id: 'site.models.title', message: 'Model families'})}
      text={translate({
        id: 'site.models.text',
        message:
          'Data-parallel plugins take any torch.nn.Module. Tensor and pipeline parallelism shard the layers of these ' +
          'Hugging Face models and partition them into stages. When this site was built, a small model of each family ' +
          'was sharded, and its output compared with that of the unsharded model.',
      })}
    >
      <Matrix matrix={landing.models} label={translate({id: 'site.models.label', message: 'Model'})} />
    </ListPage>
  );
}
