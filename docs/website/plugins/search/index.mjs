/** Writes what the search scans, `search-index/VERSION.json`, from the pages that were built. */

import {mkdir, readFile, writeFile} from 'node:fs/promises';
import {join} from 'node:path';
import {collect} from './collect.mjs';

const DOCS = 'docusaurus-plugin-content-docs';

/** @param {import('@docusaurus/types').LoadContext} context */
export default function searchIndex({siteDir, i18n}) {
  return {
    name: 'search-index',
    async postBuild({outDir, baseUrl, plugins}) {
      const synonyms = JSON.parse(await readFile(join(siteDir, 'data/search.json'), 'utf8'))[i18n.currentLocale];
      const {loadedVersions} = plugins.find(({name}) => name === DOCS).content;
      await mkdir(join(outDir, 'search-index'), {recursive: true});
      for (const {versionName, path, docs} of loadedVersions) {
        const read = ({permalink}) => readFile(join(outDir, permalink.slice(baseUrl.length), 'index.html'), 'utf8');
        const pages = await Promise.all(
          docs.map(async (doc) => ({
            title: doc.title,
            path: doc.permalink.slice(path.length).replace(/^\/|\/$/g, ''),
            isReference: doc.id.startsWith('api/'),
            html: await read(doc),
          })),
        );
        const file = join(outDir, 'search-index', `${versionName}.json`);
        await writeFile(file, JSON.stringify(collect(pages, synonyms)));
      }
    },
  };
}
