"""Which pages a change affects, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

from pagetest.finding import display_path
from pagetest.graph.fingerprint import HARNESS, references_of
from pagetest.graph.imports import ImportGraph
from pagetest.model.page import Page
from pagetest.model.script import make_script
from pagetest.model.tree import LANGUAGES, Tree


@dataclass(frozen=True)
class AffectedPages:
    """The pages that changed files affect."""

    tree: Tree
    root: Path
    changed: frozenset[Path]  # the files that changed

    @property
    def reasons(self) -> Mapping[str, Sequence[str]]:
        """Why each affected page is affected, by its name."""
        found = {name: list(dict.fromkeys(self._reasons(name))) for name in self.tree.names}
        return {name: reasons for name, reasons in found.items() if reasons}

    @cached_property
    def _graph(self) -> ImportGraph:
        return ImportGraph(self.root / "src", frozenset(path for path in self.changed if not path.is_file()))

    @cached_property
    def _changed_harness(self) -> list[str]:
        parts = [self.root / part for part in HARNESS]
        return self._reasons_for("is run with", {path for path in self.changed if any(map(path.is_relative_to, parts))})

    def _reasons(self, name: str) -> Iterator[str]:
        texts = {self.tree.path(name, language) for language in LANGUAGES}
        yield from self._reasons_for("is written in", texts)
        for language in self.tree.languages(name):
            page = self.tree.page(name, language)
            yield from self._reasons_for("imports", self._graph.reached(references_of(make_script(page))))
            yield from self._reasons_for(
                "documents", {path for hook in page.hooks for path in self._graph.definition_files(hook.text)}
            )
            yield from self._reasons_for("shows", set(_linked_files(page)))
        yield from self._changed_harness

    def _reasons_for(self, verb: str, files: set[Path] | frozenset[Path]) -> list[str]:
        return [f"{verb} {display_path(path)}" for path in sorted(files & self.changed)]


def _linked_files(page: Page) -> Iterator[Path]:
    """The files that the page shows or links, images above all; other pages do not count."""
    for link in page.links:
        target = unquote(link.text.partition("#")[0].partition("?")[0])
        if target and ":" not in target and not target.endswith(".md"):
            yield (page.path.parent / target).resolve()
