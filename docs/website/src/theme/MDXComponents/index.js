import MDXComponents from '@theme-original/MDXComponents';
import Tabs from '@theme/Tabs';
import TabItem from '@theme/TabItem';
import * as api from '@site/src/components/api/index.js';
import Fold from '@site/src/components/page/Fold.js';
import NotRun from '@site/src/components/page/NotRun.js';
import Output from '@site/src/components/page/Output.js';
import PageStatus from '@site/src/components/page/PageStatus.js';
import RunPage from '@site/src/components/page/RunPage.js';
import ScrollFigure from '@site/src/components/page/ScrollFigure.js';
import ScrollTable from '@site/src/components/page/ScrollTable.js';
import StaleSection from '@site/src/components/page/StaleSection.js';

/** What the remark plugin names, in addition to the theme's own components. */
export default {
  ...MDXComponents,
  ...api,
  Fold,
  NotRun,
  Output,
  PageStatus,
  RunPage,
  StaleSection,
  TabItem,
  Tabs,
  img: ScrollFigure,
  table: ScrollTable,
};
