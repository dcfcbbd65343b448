"""The page as the website reads it: three lines of front matter, then the author's file as it is."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from pagebuild.runs import machine_name
from pagetest.checks.figures import own_address
from pagetest.model.page import Block, FrontMatter, Page

_SENTENCE = re.compile(".+?(?:[\u3002\uff01\uff1f]|[.!?](?=\\s+[^a-z]|$))")
_HOOK = re.compile(r"\{\{.*\}\}")
_WIDE = re.compile("[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]")
NUM_LINES = 3
"""How many lines stand before the author's first one."""
_LINE_ENDS = "\u2028\u2029"
_UNPRINTABLE = (*map(chr, range(0x7F, 0xA0)), "\ufffe", "\uffff")
_ESCAPED = {character: f"\\u{ord(character):04x}" for character in (*_LINE_ENDS, *_UNPRINTABLE)}
"""What stands in JSON as it is, and may not stand in a line of YAML."""


def page_title(page: Page) -> str:
    """The text of the first heading; the stem of a page that has none."""
    return next((heading.text for heading in page.headings), page.stem)


def first_sentence(page: Page) -> str:
    """The outcome that the author names, or the first sentence of plain prose, or the title."""
    if page.front:
        return page.front.outcome.replace("`", "")
    text = next(_paragraphs(page), "")
    match = _SENTENCE.match(text)
    return match.group() if match else text or page_title(page)


def _paragraphs(page: Page) -> Iterator[str]:
    tokens = MarkdownIt("commonmark").enable("table").parse("\n".join(page.body))
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


@dataclass(frozen=True)
class PageFacts:
    """What the website shows around a page."""

    source: str
    edit_address: str | None  # where it can be edited; None for what is frozen
    kind: str = "tutorial"
    badges: list[dict[str, Any]] = field(default_factory=list)
    downloads: Mapping[str, str] = field(default_factory=dict)
    stale: tuple[str, ...] = ()  # the headings of the sections that are older than their original
    front: FrontMatter | None = None  # what the author says about the page
    headings: Mapping[int, str] = field(default_factory=dict)  # the id of each heading, by the author's line
    links: Mapping[str, str] = field(default_factory=dict)  # those whose anchor becomes another
    outputs: Mapping[Block, str] = field(default_factory=dict)
    recorded: Mapping[str, Any] | None = None  # the record that these are from


def front_matter(name: str, language: str, facts: PageFacts, **words: str) -> str:
    """The three lines: YAML whose only line is a flow mapping in the form of JSON."""
    shown = {
        "name": name,
        "lang": language,
        "source": facts.source,
        "badges": facts.badges,
        "downloads": facts.downloads,
        "stale": facts.stale,
        "kind": facts.kind,
    }
    if facts.front:
        about = asdict(facts.front)
        shown["about"] = {key: about[key] for key in ("kind", "outcome", "minutes", "devices")}
    if facts.headings:
        shown["headings"] = {line + NUM_LINES: anchor for line, anchor in facts.headings.items()}
    if facts.links:
        shown["links"] = facts.links
    if facts.recorded:
        fences = {block.line - 1 + NUM_LINES: text for block, text in facts.outputs.items()}
        machine = machine_name(facts.recorded)
        shown["recorded"] = {"date": facts.recorded["date"], "machine": machine, "outputs": fences}
    line = json.dumps(words | {"custom_edit_url": facts.edit_address, "page": shown}, ensure_ascii=False)
    return f"---\n{line.translate(str.maketrans(_ESCAPED))}\n---\n"


def website_page(page: Page, facts: PageFacts, description: str) -> str:
    """A tutorial: line N of the author is line N + 3 of the website; the author's front matter is in the new one."""
    body = "\n".join(map(own_address, page.body))
    return front_matter(page.name, page.language, facts, description=description) + body
