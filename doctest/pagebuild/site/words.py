"""The words of a page that stand for it in lists and search results: its title and its first sentence."""

import re
from collections.abc import Iterator
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token

from pagetest.model.page import Page

_SENTENCE = re.compile(".+?(?:[\u3002\uff01\uff1f]|[.!?](?=\\s+[^a-z]|$))")
_HOOK = re.compile(r"\{\{.*\}\}")
_WIDE = re.compile("[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]")


def page_title(page: Page) -> str:
    """The text of the first heading; the stem of a page that has none."""
    return next((heading.text for heading in page.headings), page.stem)


def first_sentence(page: Page) -> str:
    """The first sentence of the first paragraph of plain prose; the title of a page without one."""
    text = next(_paragraphs(page), "")
    match = _SENTENCE.match(text)
    return match.group() if match else text or page_title(page)


def _paragraphs(page: Page) -> Iterator[str]:
    tokens = MarkdownIt("commonmark").enable("table").parse("\n".join(page.lines))
    for before, token in pairwise(tokens):
        if before.type == "paragraph_open" and before.level == 0:
            text = _plain_text(token.children or [])
            if text and not _HOOK.fullmatch(text):
                yield text


def _plain_text(children: list[Token]) -> str:
    """What is read of a paragraph; lines of Chinese are joined without a space."""
    parts = [child.content if child.type in {"text", "code_inline"} else _line_separator(child) for child in children]
    lines = "".join(parts).split("\n")
    text = lines[0].strip()
    for line in (line.strip() for line in lines[1:]):
        joined = _WIDE.match(text[-1:]) or _WIDE.match(line[:1])
        text += line if joined else f" {line}"
    return text.strip()


def _line_separator(child: Token) -> str:
    return "\n" if child.type in {"softbreak", "hardbreak"} else ""
