"""Anchors: the names under which a page's headings can be linked, on GitHub and on the website."""

import unicodedata
from collections.abc import Iterable

from pagetest.model.page import Page

_KEPT_CATEGORIES = ("L", "M", "Nd", "Nl", "Pc")
_KEPT_CHARACTERS = (" ", "-")


def anchors(page: Page) -> tuple[str, ...]:
    """The anchor of each heading, in their order."""
    return tuple(make_slugs(heading.text for heading in page.headings))


def make_slugs(texts: Iterable[str]) -> Iterable[str]:
    """Makes names of headings as GitHub does; a name that is taken gets the first free number behind it."""
    taken: dict[str, int] = {}
    for text in texts:
        plain = name = _slug(text)
        while name in taken:
            taken[plain] += 1
            name = f"{plain}-{taken[plain]}"
        taken[name] = 0
        yield name


def _slug(text: str) -> str:
    """Lower case, blanks as hyphens, and neither punctuation nor symbols; letters of every script stay."""
    return "".join("-" if character == " " else character for character in text.lower() if _is_kept(character))


def _is_kept(character: str) -> bool:
    return character in _KEPT_CHARACTERS or unicodedata.category(character).startswith(_KEPT_CATEGORIES)
