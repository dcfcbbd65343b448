import React, {useState} from 'react';
import Translate, {translate} from '@docusaurus/Translate';

/** Samples in the batch of all processes together. */
const BATCH = 64;
const WORLDS = [1, 2, 4];

/** One training step on a chosen number of processes, drawn as lanes. */
export default function Figure() {
  const [world, setWorld] = useState(2);
  return (
    <div className="step-figure">
      <fieldset className="segments">
        <legend>
          <Translate id="site.step.processes">Processes</Translate>
        </legend>
        {WORLDS.map((size) => (
          <label key={size}>
            <input type="radio" name="world" value={size} checked={size === world} onChange={() => setWorld(size)} />
            <span>{size}</span>
          </label>
        ))}
      </fieldset>
      <Lanes world={world} />
    </div>
  );
}

/** @param {{world: number}} props */
function Lanes({world}) {
  const ranks = Array.from({length: world}, (_, rank) => rank);
  return (
    <div className="lanes" data-world={world} style={{'--world': world}} aria-live="polite">
      {ranks.map((rank) => (
        <Lane key={rank} rank={rank} world={world} />
      ))}
      <div className="lane-reduce" style={{'--world': world}}>
        <strong>
          {world === 1
            ? translate({id: 'site.step.alone', message: 'nothing to exchange'})
            : translate({id: 'site.step.reduce', message: 'average of gradients'})}
        </strong>
        {world > 1 && <code>all-reduce</code>}
      </div>
      <p className="lane-result">
        <Translate id="site.step.result" values={{batch: BATCH}}>
          {'The same parameters on every rank, as after one step of one process with {batch} samples.'}
        </Translate>
      </p>
    </div>
  );
}

/** @param {{rank: number, world: number}} props */
function Lane({rank, world}) {
  const place = {'--rank': rank};
  return (
    <>
      <div className="lane-name" style={place}>
        rank {rank}
      </div>
      <div className="lane-cell lane-data" style={place}>
        <Translate id="site.step.samples" values={{samples: BATCH / world}}>
          {'{samples} samples'}
        </Translate>
        <span className="lane-batch" aria-hidden="true">
          {Array.from({length: BATCH / 4}, (_, index) => (
            <i key={index} data-own={Math.floor((index * 4) / (BATCH / world)) === rank} />
          ))}
        </span>
      </div>
      <div className="lane-cell lane-forward" style={place}>
        <Translate id="site.step.forward">forward</Translate>
      </div>
      <div className="lane-cell lane-backward" style={place}>
        <Translate id="site.step.backward">backward</Translate>
      </div>
      <div className="lane-cell lane-step" style={place}>
        <code>optimizer.step()</code>
      </div>
    </>
  );
}
