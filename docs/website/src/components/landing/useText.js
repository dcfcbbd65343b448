import useDocusaurusContext from '@docusaurus/useDocusaurusContext';

/** @typedef {{en: string, 'zh-Hans': string}} Text */

/**
 * Reads texts that the data hold in all languages.
 *
 * @returns {(text: Text) => string}
 */
export default function useText() {
  const {currentLocale} = useDocusaurusContext().i18n;
  return (text) => text[currentLocale] ?? text.en;
}
