"""Links: where each one leads, and whether anything is there."""

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from pagetest.finding import Finding
from pagetest.model.page import Page
from pagetest.model.sections import anchors
from pagetest.model.tree import Tree

_HAS_SCHEME = re.compile(r"[a-zA-Z][\w+.-]*:|//")
_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")
_PAGE = ".md"


@dataclass(frozen=True)
class LinkChecker:
    """Checks the links of a tree's pages; each page that is linked is read once."""

    tree: Tree
    _entries: Callable[[Path], frozenset[str]] = field(default_factory=lambda: cache(_names_in), compare=False)
    _anchors: dict[Path, tuple[str, ...]] = field(default_factory=dict, compare=False)

    def faults(self, page: Page) -> Iterator[Finding]:
        """Relative links lead to pages of the same language, to headings in them, or to images, and all exist."""
        for link in page.links:
            if message := "" if _HAS_SCHEME.match(link.text) else self._fault(page, link.text):
                yield Finding(page.path, link.line, f"the link `{link.text}` {message}")

    def _fault(self, page: Page, link: str) -> str:
        place, _, anchor = link.partition("#")
        file, anchor = unquote(place.partition("?")[0]), unquote(anchor)
        if file.startswith("/"):
            return "begins at the root, which is another one on GitHub and on the website: make it relative"
        target = (page.path.parent / file).resolve() if file else page.path.resolve()
        if not self._exists(target):
            return f"leads to {target.name}, which does not exist{self._similar_file(target)}: correct it"
        if not target.is_relative_to((self.tree.source / page.language).resolve()):
            is_image = target.suffix.lower() in _IMAGES
            return "" if is_image else f"leaves the {page.language} pages: link the page in this language"
        return self._anchor_fault(page, target, anchor) if anchor and target.suffix == _PAGE else ""

    def _exists(self, target: Path) -> bool:
        """Whether there is a file of exactly this name; some file systems would take another case, the website not."""
        parts = [target, *target.parents]
        spelt = all(part.name in self._entries(part.parent) for part in parts if part.is_relative_to(self.tree.source))
        return spelt and target.is_file()

    def _similar_file(self, target: Path) -> str:
        """A file next to the target with a similar name."""
        close = difflib.get_close_matches(target.name, self._entries(target.parent), n=1)
        return f" (there is {close[0]})" if close else ""

    def _anchor_fault(self, page: Page, target: Path, anchor: str) -> str:
        if target not in self._anchors:
            self._anchors[target] = anchors(page if target == page.path.resolve() else self._read(page, target))
        known = self._anchors[target]
        if anchor in known:
            return ""
        where = "this page" if target == page.path.resolve() else target.name
        close = difflib.get_close_matches(anchor.lower(), known, n=1, cutoff=0.0)
        nearest = f"; the nearest is `#{close[0]}`" if close else "; it has no heading"
        return f"leads to no heading of {where}{nearest}: correct it"

    def _read(self, page: Page, target: Path) -> Page:
        root = (self.tree.source / page.language).resolve()
        return self.tree.page(target.relative_to(root).with_suffix("").as_posix(), page.language)


def _names_in(folder: Path) -> frozenset[str]:
    return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()
