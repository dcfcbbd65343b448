/**
 * Reads what authors write in plain Markdown (hooks, alerts, tabs, markers in comments) and puts the site's components
 * in its place.
 *
 * It runs before the plugins of Docusaurus, so that headings which it makes get into the table of contents and links
 * which it makes are resolved and checked like the author's own.
 */

import {ApiLibrary} from './api/library.mjs';
import {expandHooks} from './api/hooks.mjs';
import {toAdmonitions} from './markdown/alerts.mjs';
import {shareAnchors} from './markdown/anchors.mjs';
import {attachCommand} from './markdown/command.mjs';
import {dropComments} from './markdown/comments.mjs';
import {attachOutputs} from './markdown/outputs.mjs';
import {Source} from './markdown/source.mjs';
import {markIgnored} from './markdown/regions.mjs';
import {foldRoles, nameFiles} from './markdown/roles.mjs';
import {addStatus} from './markdown/status.mjs';
import {markStale} from './markdown/stale.mjs';
import {groupTabs} from './markdown/tabs.mjs';
import {rewriteSiblings} from './markdown/tree.mjs';

/**
 * @param {{siteDir: string, repository: string}} options The repository is its address, or empty.
 */
export default function remarkPage({siteDir, repository}) {
  const library = new ApiLibrary(siteDir, repository);
  return (tree, file) => {
    const source = new Source(file, siteDir);
    shareAnchors(tree, source);
    expandHooks(tree, source, library);
    rewriteSiblings(tree, [
      toAdmonitions,
      (children) => markIgnored(children, source),
      (children) => attachOutputs(children, source),
      foldRoles,
      nameFiles,
      (children) => groupTabs(children, source),
      attachCommand,
      dropComments,
    ]);
    markStale(tree, source);
    addStatus(tree, source);
  };
}
