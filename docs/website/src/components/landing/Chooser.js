import React, {useEffect, useRef} from 'react';
import {useHistory} from '@docusaurus/router';
import {useHistorySelector} from '@docusaurus/theme-common';
import {translate} from '@docusaurus/Translate';
import Recommendation from './Recommendation.js';

/**
 * @typedef {import('./useText.js').Text} Text
 * @typedef {{workers: string[], fits: string[], goal: string[]}} When
 * @typedef {{key: string, name: string, code: string, state: 'works' | 'planned', object: string | null,
 *   page: string | null, devices: string[], precisions: string[], text: Text, when: When}} PluginData
 */

const DEFAULTS = {workers: 'many', fits: 'all', goal: 'simple'};

/** The questions; the values are those of the data. */
function questions() {
  return [
    {
      key: 'workers',
      title: translate({id: 'site.chooser.workers', message: 'How many GPUs, or CPU processes?'}),
      answers: [
        ['one', translate({id: 'site.chooser.workers.one', message: 'one'})],
        ['many', translate({id: 'site.chooser.workers.many', message: 'several'})],
      ],
    },
    {
      key: 'fits',
      title: translate({id: 'site.chooser.fits', message: 'What fits in the memory of one device?'}),
      answers: [
        ['all', translate({id: 'site.chooser.fits.all', message: 'model, gradients and optimizer states'})],
        ['states', translate({id: 'site.chooser.fits.states', message: 'only the model'})],
        ['none', translate({id: 'site.chooser.fits.none', message: 'not even the model'})],
      ],
    },
    {
      key: 'goal',
      title: translate({id: 'site.chooser.goal', message: 'What matters most?'}),
      answers: [
        ['simple', translate({id: 'site.chooser.goal.simple', message: 'few code changes'})],
        ['speed', translate({id: 'site.chooser.goal.speed', message: 'speed'})],
        ['memory', translate({id: 'site.chooser.goal.memory', message: 'the largest model'})],
      ],
    },
  ];
}

/**
 * @param {{plugins: PluginData[]}} props
 */
export default function Chooser({plugins}) {
  const [answers, setAnswers] = useAnswers();
  const ref = useScrollToSharedAnswer();
  const choice = plugins.find(({when}) => Object.entries(answers).every(([key, answer]) => when[key].includes(answer)));
  const today = plugins.find(({state, when}) => state === 'works' && when.workers.includes(answers.workers));
  return (
    <div className="chooser" ref={ref}>
      <form className="chooser-questions">
        {questions().map((question) => (
          <Question
            key={question.key}
            question={question}
            answer={answers[question.key]}
            onAnswer={(answer) => setAnswers({...answers, [question.key]: answer})}
          />
        ))}
      </form>
      <output className="chooser-answer">
        <Recommendation plugin={choice} />
        {choice.state === 'planned' && today && (
          <div className="chooser-today">
            <p className="eyebrow">{todayLabel(today.when.fits.includes(answers.fits))}</p>
            <Recommendation plugin={today} />
          </div>
        )}
      </output>
    </div>
  );
}

/** The answers, which are in the address, so that they can be shared; what it lacks, or holds wrongly, is the default. */
function useAnswers() {
  const history = useHistory();
  const given = new URLSearchParams(useHistorySelector(({location}) => location.search));
  const known = questions().map(({key, answers}) => {
    const isKnown = answers.some(([value]) => value === given.get(key));
    return [key, isKnown ? given.get(key) : DEFAULTS[key]];
  });
  const setAnswers = (answers) => history.replace({...history.location, search: `?${new URLSearchParams(answers)}`});
  return [Object.fromEntries(known), setAnswers];
}

/** Who opens a shared answer sees the chooser first. */
function useScrollToSharedAnswer() {
  const ref = useRef(null);
  const {location} = useHistory();
  useEffect(() => {
    if (!location.hash && Object.keys(DEFAULTS).some((key) => new URLSearchParams(location.search).has(key))) {
      ref.current.closest('section').scrollIntoView();
    }
  }, []);
  return ref;
}

/**
 * What works today may need more memory than the answer allows; then it is no substitute, and the label says so.
 *
 * @param {boolean} isSubstitute
 */
function todayLabel(isSubstitute) {
  return isSubstitute
    ? translate({id: 'site.chooser.today', message: 'Until then, this works'})
    : translate({id: 'site.chooser.todayIfFits', message: 'Works today, for models that fit on one device'});
}

/**
 * @param {{question: ReturnType<typeof questions>[0], answer: string, onAnswer: (answer: string) => void}} props
 */
function Question({question: {key, title, answers}, answer, onAnswer}) {
  return (
    <fieldset>
      <legend>{title}</legend>
      <div className="choices">
        {answers.map(([value, label]) => (
          <label key={value} className="choice">
            <input type="radio" name={key} value={value} checked={value === answer} onChange={() => onAnswer(value)} />
            <span>{label}</span>
          </label>
        ))}
      </div>
    </fieldset>
  );
}
