import React from 'react';
import {useCodeBlockContext} from '@docusaurus/theme-common/internal';
import Layout from '@theme-original/CodeBlock/Layout';
import useHiddenEdges from '@site/src/components/useHiddenEdges.js';

/** A block of code, which shows at its edges that its lines go on. */
export default function CodeBlockLayout(props) {
  useHiddenEdges(useCodeBlockContext().wordWrap.codeBlockRef);
  return <Layout {...props} />;
}
