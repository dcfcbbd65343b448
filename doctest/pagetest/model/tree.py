"""The documentation tree: its pages, and the names by which they are called."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from pagetest.finding import UsageError
from pagetest.model.page import Page
from pagetest.model.reader import read_page

LANGUAGES = ("en", "zh-Hans")


class UnknownPageError(UsageError):
    """No page, or more than one, goes by the name."""


@dataclass(frozen=True)
class Tree:
    """A folder with one folder of Markdown pages per language."""

    source: Path  # the folder that holds the language folders

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every page's name, whatever its languages: its path inside a language's folder, without suffix."""
        return tuple(sorted({name for language in LANGUAGES for name in self._names_in(language)}))

    def path(self, name: str, language: str) -> Path:
        """Where the page is, or would be."""
        return self.source / language / f"{name}.md"

    def languages(self, name: str) -> tuple[str, ...]:
        """The languages in which the page exists."""
        return tuple(language for language in LANGUAGES if self.path(name, language).is_file())

    def page(self, name: str, language: str) -> Page:
        """Reads one page."""
        return read_page(self.path(name, language), language, name)

    def resolve(self, wanted: str) -> str:
        """Finds the page that is meant by a stem, a path inside the tree, or a path of the file."""
        path = _path_in_language(PurePosixPath(wanted.removesuffix(".md")))
        if path in self.names:
            return path
        fitting = [name for name in self.names if f"/{name}".endswith(f"/{path}")]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise UnknownPageError(f"`{wanted}` names {len(fitting)} pages, give one of: {', '.join(fitting)}")
        raise UnknownPageError(f"no page is called `{wanted}`{self._nearest_names(path)}; --list shows all pages")

    def _nearest_names(self, path: str) -> str:
        stems = {name.rpartition("/")[2]: name for name in self.names}
        close = difflib.get_close_matches(path, [*self.names, *stems], n=3, cutoff=0.5)
        names = dict.fromkeys(stems.get(match, match) for match in close)
        return f"; the nearest: {', '.join(names)}" if names else ""

    def _names_in(self, language: str) -> Iterator[str]:
        for path in (self.source / language).rglob("*.md"):
            relative = path.relative_to(self.source / language)
            if not any(part.startswith(("_", ".")) for part in relative.parts):
                yield relative.with_suffix("").as_posix()


def _path_in_language(path: PurePosixPath) -> str:
    """The part of a path below the language's folder."""
    parts = [part for part in path.parts if part != "."]
    start = max((index + 1 for index, part in enumerate(parts) if part in LANGUAGES), default=0)
    return "/".join(parts[start:])
