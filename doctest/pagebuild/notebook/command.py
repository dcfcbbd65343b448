"""`docs_build.py notebooks`: makes every page a notebook, with the outputs of the page's recorded run."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pagebuild.notebook.builder import BuiltNotebook, NotebookBuilder
from pagebuild.notebook.kind import ONE_RANK, SEVERAL_RANKS, notebook_kind
from pagebuild.notebook.report import report_lines, summary
from pagebuild.site.edition import BrokenInputError, read_json
from pagebuild.site.project import read_project
from pagetest.finding import UsageError
from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.limits import scaled
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.results.recorder import Recorder, run_facts
from pagetest.results.records import FOLDER_NAME, Records
from pagetest.results.result import FAIL, Result
from pagetest.results.run_finder import RunFinder
from pagetest.results.sample import sample
from pagetest.run.device import Device
from pagetest.run.runner import Runner
from pagetest.suite import Suite

OK, FAILED, USAGE = 0, 1, 2
ALL = "all"
_EXECUTED = {SEVERAL_RANKS: 3, ONE_RANK: 2}
"""How many notebooks of each kind are executed."""


def configure(parser: argparse.ArgumentParser, root: Path) -> None:
    """Adds the options."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="a page: booster_api, basics/booster_api (all)")
    parser.add_argument("--lang", choices=[*LANGUAGES, ALL], default=ALL, help="which language (all)")
    parser.add_argument("--source", type=Path, default=root / "docs" / "source", help="the tree of pages (docs/source)")
    api = root / "build" / "docs" / "api.json"
    parser.add_argument("--api", type=Path, default=api, help="the API reference (build/docs/api.json)")
    output = root / "build" / "docs" / "notebooks"
    parser.add_argument("--output", type=Path, default=output, help="where they go (build/docs/notebooks)")
    build = root / "build" / "docs" / "pages"
    parser.add_argument("--build", type=Path, default=build, help="where pages are run (build/docs/pages)")
    parser.add_argument("--execute-all", action="store_true", help="execute every notebook, not a few")
    parser.add_argument("--timeout", type=float, default=scaled(300.0), metavar="SECONDS", help="limit per page (300)")


def run(options: argparse.Namespace, root: Path) -> int:
    """Runs the subcommand; returns 0 if all notebooks were built, 1 if one failed, 2 for an unknown page."""
    tree = Tree(options.source.resolve())
    try:
        names = tuple(dict.fromkeys(tree.resolve(name) for name in options.names)) or tree.names
        builder = _make_builder(tree, names, options, root)
    except (UsageError, BrokenInputError) as error:
        sys.stderr.write(f"docs_build.py notebooks: {error}\n")
        return USAGE
    width = max(map(len, names), default=0)
    done: list[BuiltNotebook] = []
    for made in (made for name in names for made in builder.build_page(name)):
        done.append(made)
        sys.stdout.writelines(f"{line}\n" for line in report_lines(made, width))
        sys.stdout.flush()
    sys.stdout.write(f"{summary(done)}\n")
    return FAILED if any(made.status == FAIL for made in done) else OK


def _make_builder(tree: Tree, names: Sequence[str], options: argparse.Namespace, root: Path) -> NotebookBuilder:
    graph, build, device, now = ImportGraph(root / "src"), options.build.resolve(), Device(), run_facts(root)
    pages = [tree.page(name, language) for name in tree.names for language in tree.languages(name)]
    reference = read_json(options.api, "run `python docs_build.py api`")
    project = read_project(root, datetime.now(UTC).date().isoformat())
    facts = {"version": reference["version"], "commit": project.commit, "date": project.date}
    fingerprints = {page.path: fingerprint(page, graph) for page in pages}
    suite = Suite(tree, LANGUAGES if options.lang == ALL else (options.lang,), root / "src")
    runner = Runner(root, build, options.timeout, device=device)
    records = [Records(build.with_name(FOLDER_NAME)), Records(tree.source.with_name(FOLDER_NAME))]
    recorder = Recorder(records[0], device, root, now)

    def run_page(page: Page) -> Result:
        result = suite.run_page(page, runner)
        recorder.add(result)
        return result

    return NotebookBuilder(
        root,
        suite,
        reference["objects"],
        options.output,
        options.timeout,
        RunFinder(records, tree, graph, device.expected, now),
        run_page,
        frozenset(names) if options.execute_all else _choose_executed(tree, names),
        facts,
        fingerprints,
    )


def _choose_executed(tree: Tree, names: Sequence[str]) -> frozenset[str]:
    """The pages whose notebooks are executed: a few of each kind, always the same."""
    kinds = {name: notebook_kind(tree.page(name, tree.languages(name)[0])) for name in names}
    pages = {kind: [name for name in names if kinds[name] == kind] for kind in _EXECUTED}
    return frozenset().union(*(sample(pages[kind], "executed notebooks", size) for kind, size in _EXECUTED.items()))
