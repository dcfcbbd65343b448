"""What the harness can tell about the pages of the present documentation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagebuild.site.edition import current_edition
from pagetest.checks.translations import stale_sections
from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES, Tree


@dataclass(frozen=True)
class Insight:
    """Two questions about a page.

    Attributes:
        fingerprint: Stands for its code, and for all project code that it reaches.
        stale: The headings of a translation's sections that lag behind the original.
    """

    fingerprint: Callable[[Page], str]
    stale: Callable[[Page], tuple[str, ...]]


def make_insight(root: Path) -> Insight:
    """Asks the harness.

    Args:
        root: The project's root.
    """
    graph, tree = ImportGraph(root / "src"), current_edition(root).tree
    return Insight(lambda page: fingerprint(page, graph), lambda page: stale_headings(tree, page))


def stale_headings(tree: Tree, page: Page) -> tuple[str, ...]:
    """The headings of a translation's sections whose original has changed since; none for an original.

    Args:
        tree: The tree that holds the page and its original.
        page: The page.
    """
    if page.language == LANGUAGES[0]:
        return ()
    return tuple(heading for _, heading, _ in stale_sections(tree, page.name, page.language))
