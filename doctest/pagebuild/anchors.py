"""Anchors that are the same in all languages: those of the original's headings, in their order."""

import posixpath
from dataclasses import dataclass, field
from urllib.parse import unquote

from pagetest.model.page import Page
from pagetest.model.sections import anchors
from pagetest.model.tree import LANGUAGES, Tree

_PAGE = ".md"


@dataclass(frozen=True)
class SharedAnchors:
    """The shared anchors of a tree's pages; authors write those that GitHub makes of the page in its language."""

    tree: Tree
    _by_page: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict, compare=False)

    def of_headings(self, page: Page) -> dict[int, str]:
        """The id of each heading, by its line."""
        return {
            heading.line: shared for heading, shared in zip(page.headings, self._shared(page).values(), strict=True)
        }

    def of_links(self, page: Page) -> dict[str, str]:
        """The links that lead to a heading by another anchor than the shared one, each with what it becomes."""
        found = {}
        for link in {unquote(link.text) for link in page.links}:
            file, _, anchor = link.partition("#")
            shared = self._linked_anchors(page, file).get(anchor, anchor) if anchor else ""
            if shared != anchor:
                found[link] = f"{file}#{shared}"
        return dict(sorted(found.items()))

    def _linked_anchors(self, page: Page, file: str) -> dict[str, str]:
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page.name), file)).removesuffix(_PAGE)
        if not file:
            return self._shared(page)
        if not file.endswith(_PAGE) or page.language not in self.tree.languages(name):
            return {}
        return self._shared(self.tree.page(name, page.language))

    def _shared(self, page: Page) -> dict[str, str]:
        """The shared anchor for each of a page's own, in their order."""
        key = page.name, page.language
        if key not in self._by_page:
            own, original = anchors(page), LANGUAGES[0]
            is_translation = page.language != original and original in self.tree.languages(page.name)
            shared = anchors(self.tree.page(page.name, original)) if is_translation else own
            # The rules of pages make the numbers equal; a page of an older release may be freer.
            self._by_page[key] = dict(zip(own, shared if len(shared) == len(own) else own, strict=True))
        return self._by_page[key]
