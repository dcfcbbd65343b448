"""Sections: the prose of a page from one heading to the next, each with a hash of its text."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pagetest.model.page import Heading, Page

_KEPT_CATEGORIES = ("L", "M", "Nd", "Nl", "Pc")
_KEPT_CHARACTERS = (" ", "-")
_COMMAND = re.compile(r"<!--+\s*doc-test-command.*?-->", re.DOTALL)
_HASH_LENGTH = 12


def anchors(page: Page) -> tuple[str, ...]:
    """The anchor of each heading, in their order."""
    return tuple(make_slugs(heading.text for heading in page.headings))


def make_slugs(texts: Iterable[str]) -> Iterable[str]:
    """Makes names of headings as GitHub does; a name that is taken gets the first free number after it."""
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


# [Note: what counts as prose]
# Everything that a translator has to follow by hand: headings, text, tables, figures and links, blocks that are only
# shown. What runs, output and the command are no prose, for these are compared with the original anyway; nor is the
# front matter, of which only the outcome is translated.
# White space is normalized, so that filling a paragraph anew changes nothing.


@dataclass(frozen=True)
class Section:
    """A heading and the prose below it."""

    slug: str  # the heading's anchor; empty for what stands before the first heading
    heading: str
    line: int
    level: int  # the heading's level; 0 for what stands before the first one
    hash: str  # of the prose; see [Note: what counts as prose]


def sections(page: Page) -> tuple[Section, ...]:
    """The sections of a page, in order."""
    return tuple(_split_sections(page))


def _split_sections(page: Page) -> Iterator[Section]:
    prose = list(page.body)
    for block in page.blocks:
        if block.is_code or block.is_output:
            prose[block.line - 2 : block.end] = [""] * (block.end - block.line + 2)
    starts = [(Heading(0, 1), ""), *zip(page.headings, anchors(page), strict=True)]
    ends = [heading.line - 1 for heading, _ in starts[1:]] + [len(prose)]
    for (heading, slug), end in zip(starts, ends, strict=True):
        words = _COMMAND.sub("", "\n".join(prose[heading.line - 1 : end])).split()
        if words or heading.level:
            digest = hashlib.sha256(" ".join(words).encode()).hexdigest()[:_HASH_LENGTH]
            yield Section(slug, heading.text, heading.line, heading.level, digest)
