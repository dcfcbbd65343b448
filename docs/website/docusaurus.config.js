/**
 * The website of the documentation.
 *
 * Pages, sidebars, versions and data are written by `python docs_build.py site`; nothing here knows a page by name
 * except the links of the navigation.
 *
 * Environment (every variable has a default, because each Docusaurus command evaluates this file):
 * - DOCS_URL        where the site will stand, for canonical links: `http://localhost:3000`, where it is served here
 * - DOCS_BASE_URL   the folder on that host: `/` or `/colossal/`
 */

import {existsSync, readFileSync} from 'node:fs';
import {fileURLToPath} from 'node:url';
import remarkMath from 'remark-math';
import rehypeKatex from 'rehype-katex';
import remarkPage from './plugins/remark-page.mjs';
import {prismDark, prismLight} from './src/code-theme.js';

const SITE_DIR = fileURLToPath(new URL('.', import.meta.url));

/** @param {string} file */
const readJson = (file) => JSON.parse(readFileSync(new URL(file, import.meta.url), 'utf8'));

if (!existsSync(new URL('data/site.json', import.meta.url))) {
  throw new Error(
    'The site is built from data/site.json and its neighbours. Found none. Run: python docs_build.py site',
  );
}

/** @type {{repository: string, version: string, commit: string, date: string}} The repository is empty, or its address. */
const site = readJson('data/site.json');
const releases = existsSync(new URL('versions.json', import.meta.url)) ? readJson('versions.json') : [];

const CSS = ['tokens', 'base', 'chrome', 'content', 'api', 'home', 'choice', 'search'].map(
  (name) => `./src/css/${name}.css`,
);

/** @type {import('@docusaurus/types').Config} */
export default {
  title: 'colossal',
  tagline: 'Large-scale PyTorch training that anyone can learn, run and trust',
  url: process.env.DOCS_URL ?? 'http://localhost:3000',
  baseUrl: process.env.DOCS_BASE_URL ?? '/',
  // A page is a folder with an index.html, which every static server serves under the page's address.
  trailingSlash: true,
  favicon: 'img/favicon.svg',
  onBrokenLinks: 'throw',
  onBrokenAnchors: 'throw',
  onDuplicateRoutes: 'throw',
  markdown: {
    // `.md` is CommonMark, not MDX: braces, comments and `a < b` mean what they mean on GitHub.
    format: 'detect',
    mermaid: true,
    emoji: false,
    mdx1Compat: {comments: false, admonitions: false, headingIds: true},
    hooks: {onBrokenMarkdownLinks: 'throw', onBrokenMarkdownImages: 'throw'},
  },
  future: {v4: true, faster: true},
  i18n: {
    defaultLocale: 'en',
    locales: ['en', 'zh-Hans'],
    localeConfigs: {
      en: {label: 'English', htmlLang: 'en'},
      'zh-Hans': {label: '简体中文', htmlLang: 'zh-Hans'},
    },
  },
  clientModules: ['./src/css/katex.js', './src/search/marking.js'],
  customFields: {site},
  plugins: [
    [
      '@docusaurus/plugin-content-docs',
      {
        path: 'docs',
        routeBasePath: 'docs',
        sidebarPath: './sidebars.json',
        sidebarCollapsed: false,
        beforeDefaultRemarkPlugins: [[remarkPage, {siteDir: SITE_DIR, repository: site.repository}]],
        remarkPlugins: [remarkMath],
        rehypePlugins: [rehypeKatex],
        admonitions: false,
        versions: {current: {label: 'main', banner: releases.length > 0 ? 'unreleased' : 'none'}},
      },
    ],
    ['@docusaurus/plugin-content-pages', {}],
    ['@docusaurus/plugin-sitemap', {ignorePatterns: ['/search/', '/zh-Hans/search/']}],
    './plugins/search/index.mjs',
  ],
  themes: [['@docusaurus/theme-classic', {customCss: CSS}], '@docusaurus/theme-mermaid'],
  themeConfig: {
    colorMode: {respectPrefersColorScheme: true},
    docs: {sidebar: {hideable: false, autoCollapseCategories: false}, versionPersistence: 'none'},
    tableOfContents: {minHeadingLevel: 2, maxHeadingLevel: 4},
    navbar: {
      title: 'colossal',
      logo: {alt: '', src: 'img/logo.svg', srcDark: 'img/logo-dark.svg', width: 26, height: 26},
      items: [
        {type: 'docSidebar', sidebarId: 'tutorialSidebar', label: 'Learn', position: 'left'},
        {type: 'docSidebar', sidebarId: 'apiSidebar', label: 'API', position: 'left'},
        {to: '/features', label: 'Features', position: 'left'},
        {
          type: 'docsVersionDropdown',
          position: 'right',
          dropdownItemsAfter: [{to: '/versions', label: 'All versions'}],
        },
        {type: 'localeDropdown', position: 'right', className: 'language-menu'},
        ...(site.repository ? [{href: site.repository, label: 'Source', position: 'right'}] : []),
        {type: 'search', position: 'right'},
      ],
    },
    prism: {theme: prismLight, darkTheme: prismDark, additionalLanguages: ['bash', 'json', 'toml']},
    mermaid: {theme: {light: 'neutral', dark: 'dark'}},
  },
};
