"""Coverage: which pages of an edition are verified by runs, and which translations are stale."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagebuild.runs import current_runs, released_runs
from pagebuild.site.badges import PageResults, read_results
from pagebuild.site.edition import Edition, current_edition
from pagetest.checks.translations import stale_sections
from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES, Tree


@dataclass(frozen=True)
class Coverage:
    """What the harness knows about pages: results of runs, fingerprints, stale sections."""

    results: PageResults
    # The hash of a page's code as it is now, and for all project code that it reaches.
    fingerprint: Callable[[Page], str]
    # The headings of a translation's sections that are older than the original.
    stale_headings: Callable[[Page], tuple[str, ...]]


def current_coverage(root: Path) -> Coverage:
    """Asks the harness about the present documentation."""
    graph, edition = ImportGraph(root / "src"), current_edition(root)
    results = read_results(edition.records, current_runs(root, edition.tree, edition.records))
    return Coverage(results, lambda page: fingerprint(page, graph), lambda page: stale_headings(edition.tree, page))


def released_coverage(edition: Edition) -> Coverage:
    """What is known about a released version, whose code is not here any more and cannot change."""
    [folder] = edition.records
    return Coverage(read_results([folder], released_runs(folder)), lambda _: "", lambda _: ())


def stale_headings(tree: Tree, page: Page) -> tuple[str, ...]:
    """The headings of a translation's sections whose original has changed since; none for an original."""
    if page.language == LANGUAGES[0]:
        return ()
    return tuple(heading for _, heading, _ in stale_sections(tree, page.name, page.language))
