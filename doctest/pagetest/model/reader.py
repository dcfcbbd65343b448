"""Reads Markdown into a page: one walk over the tokens of the parser."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from pagetest.finding import Finding
from pagetest.model.page import (
    DEVICES,
    KINDS,
    OBJECT_REPLACEMENT,
    Alert,
    Block,
    FrontMatter,
    Heading,
    LocatedText,
    Page,
    Tabs,
)

_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_MARKER = re.compile(r"(?:doc-test-|(?=tabs-))(\S+?)\s*(?::\s*(.*?))?\s*", re.DOTALL)
_MARKER_LIKE = re.compile(r"-*\s*(?:doc-?test|ignore-?test|tabs-)", re.IGNORECASE)
_KNOWN_MARKERS = "doc-test-command, doc-test-alone, doc-test-ignore-start, doc-test-ignore-end, tabs-start and tabs-end"
_ALERT = re.compile(r"\[!(\w+)\][ \t]*(?:\n|\Z)")
_ALERT_LIKE = re.compile(r"\[!(?:note|tip|important|warning|caution)\]", re.IGNORECASE)
_FRONT_MATTER = re.compile(r"---\n((?:.*\n)*?)---(?:\n|\Z)")
_FIELD = re.compile(r"(\w+): +(\S.*?) *")
_FIELDS = ("kind", "outcome", "minutes", "devices")
_LANGUAGE = re.compile(r"[\w+-]+|\Z")
_HOOK = re.compile(r"\{\{\s*autodoc:\s*([A-Za-z_][\w.]*)\s*\}\}")
_HOOK_LIKE = re.compile(r"\{\{\s*autodoc")
_JSX_STYLE = re.compile(r"style\s*=\s*\{\{")
_HTML_LINK = re.compile(r"\b(?:src|href)\s*=\s*[\"']([^\"']+)[\"']")


ALERTS = ("NOTE", "TIP", "IMPORTANT", "WARNING", "CAUTION")


def read_page(path: Path, language: str, name: str) -> Page:
    """Reads the page from its file."""
    return parse_page(path.read_bytes().decode("utf-8-sig", errors="replace"), path, language, name)


def parse_page(text: str, path: Path, language: str = "en", name: str = "page") -> Page:
    """Parses Markdown text."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    reader = _Reader(path, text.split("\n"))
    front, body = None, text
    if match := _FRONT_MATTER.match(text):
        front = reader.read_front_matter(match.group(1).split("\n")[:-1])
        body = "\n" * match.group().count("\n") + text[match.end() :]
    reader.read(MarkdownIt("commonmark").enable("table").parse(body))
    return Page(
        path,
        language,
        name,
        tuple(reader.lines),
        tuple(reader.blocks),
        tuple(reader.commands),
        tuple(reader.headings),
        tuple(reader.hooks),
        tuple(reader.links),
        tuple(reader.alerts),
        tuple(reader.tabs),
        tuple(reader.prose),
        tuple(reader.findings),
        tuple(reader.exclusive),
        front,
    )


@dataclass
class _Reader:
    """Walks the tokens of one page in order and sorts them into the page's parts."""

    path: Path
    lines: list[str]
    blocks: list[Block] = field(default_factory=list)
    commands: list[LocatedText] = field(default_factory=list)
    headings: list[Heading] = field(default_factory=list)
    hooks: list[LocatedText] = field(default_factory=list)
    links: list[LocatedText] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    tabs: list[Tabs] = field(default_factory=list)
    prose: list[tuple[LocatedText, ...]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    exclusive: list[LocatedText] = field(default_factory=list)
    open_region: LocatedText | None = None
    open_tabs: Tabs | None = None
    before: tuple[Token, ...] = ()

    def read(self, tokens: list[Token]) -> None:
        readers: dict[str, Callable[[Token], None]] = {
            "fence": self._read_fence,
            "heading_open": self._read_heading,
            "html_block": self._read_html,
            "inline": self._read_inline,
        }
        for token in tokens:
            if token.type in readers:
                readers[token.type](token)
            self.before = (*self.before[-1:], token)
        if self.open_region:
            self._add_finding(
                self.open_region.line, "doc-test-ignore-start is never closed: add `<!--- doc-test-ignore-end -->`"
            )
        if self.open_tabs:
            self._add_finding(self.open_tabs.line, "tabs-start is never closed: add `<!--- tabs-end -->`")

    def read_front_matter(self, lines: list[str]) -> FrontMatter | None:
        """Reads the lines `key: value` between the two lines `---`; None where they cannot be used."""
        values: dict[str, str] = {}
        for number, line in enumerate(lines, 2):
            match = _FIELD.fullmatch(line)
            if not match or match.group(1) not in _FIELDS or match.group(1) in values:
                wanted = f"the front matter has a line `key: value` for each of {', '.join(_FIELDS)}"
                self._add_finding(number, f"{wanted}: correct `{line}`")
                return None
            values[match.group(1)] = match.group(2)
        if missing := [name for name in _FIELDS if name not in values]:
            self._add_finding(1, f"the front matter lacks {', '.join(missing)}: add it")
            return None
        devices = tuple(device.strip() for device in values["devices"].split(","))
        faults = {
            "kind": values["kind"] not in KINDS and f"one of {', '.join(KINDS)}",
            "outcome": _needs_quotes(values["outcome"]) and "a sentence without `: ` that begins with a letter",
            "minutes": not values["minutes"].isdecimal() and "an integer",
            "devices": not set(devices) <= {*DEVICES} and f"a list of {', '.join(DEVICES)}",
        }
        for name, wanted in faults.items():
            if wanted:
                self._add_finding(2 + list(values).index(name), f"`{name}` of the front matter is {wanted}: correct it")
                return None
        return FrontMatter(values["kind"], values["outcome"], int(values["minutes"]), devices, len(lines) + 2)

    def _add_finding(self, line: int, message: str) -> None:
        self.findings.append(Finding(self.path, line, message))

    def _read_fence(self, token: Token) -> None:
        first, last = _line_range(token)
        if last - first < 2 or not self.lines[last - 1].lstrip(" \t>").startswith(token.markup):  # noqa: PLR2004
            self._add_finding(first + 1, f"the fence is never closed: add a line `{token.markup}` after the block")
        language = _LANGUAGE.findall(token.info.lower())[0]
        reason = self.open_region.text if self.open_region else ""
        ignored, info = self.open_region is not None, " ".join(token.info.split())
        self.blocks.append(Block(language, first + 2, token.content, ignored, reason, info))

    def _read_heading(self, token: Token) -> None:
        line = _line_range(token)[0] + 1
        self.headings.append(Heading(int(token.tag[1:]), line))
        if self.open_tabs:
            self._add_finding(
                line, "a heading inside tabs belongs to one of them only: move it out, or write a bold line"
            )

    def _read_html(self, token: Token) -> None:
        for match in _COMMENT.finditer(token.content):
            self._read_comment(match.group(1), _line_range(token)[0] + 1 + token.content[: match.start()].count("\n"))
        prose = _COMMENT.sub("", token.content)
        if "<!--" in prose:
            self._add_finding(
                _line_range(token)[0] + 1, "the comment is never closed and swallows the rest: end it with `-->`"
            )
        self._add_prose(token, prose)

    def _read_comment(self, inner: str, line: int) -> None:
        inner = inner.removeprefix("-").removesuffix("-").strip()
        match = _MARKER.fullmatch(inner)
        kind, text = (match.group(1), match.group(2) or "") if match else ("", "")
        if kind == "command":
            self.commands.append(LocatedText(" ".join(text.split()), line))
        elif kind == "alone":
            self.exclusive.append(LocatedText(" ".join(text.split()), line))
            if not text:
                self._add_finding(line, "a page that runs alone says why: write `<!-- doc-test-alone: the reason -->`")
        elif kind == "ignore-start":
            self._open_ignored_region(text, line)
        elif kind == "ignore-end":
            if not self.open_region:
                self._add_finding(
                    line, "doc-test-ignore-end closes nothing: remove it or add its doc-test-ignore-start"
                )
            self.open_region = None
        elif kind in {"tabs-start", "tabs-end"}:
            self._switch_tabs(kind, text, line)
        elif _MARKER_LIKE.match(inner):
            self._add_finding(line, f"unknown marker `{inner.splitlines()[0]}`: the markers are {_KNOWN_MARKERS}")

    def _open_ignored_region(self, reason: str, line: int) -> None:
        if self.open_region:
            where = self.open_region.line
            self._add_finding(
                line, f"doc-test-ignore-start inside the region opened at line {where}: close that one first"
            )
        if not reason:
            self._add_finding(line, "an ignored region says why: write `<!--- doc-test-ignore-start: the reason -->`")
        self.open_region = LocatedText(reason, line)

    def _switch_tabs(self, kind: str, group: str, line: int) -> None:
        opened, self.open_tabs = self.open_tabs, Tabs(group, line, line, ()) if kind == "tabs-start" else None
        if kind == "tabs-end" and not opened:
            self._add_finding(line, "tabs-end closes nothing: remove it or add its tabs-start")
        elif kind == "tabs-start" and opened:
            self._add_finding(line, f"tabs-start inside the tabs opened at line {opened.line}: close those first")
        elif opened and len(opened.tabs) < 2:  # noqa: PLR2004
            self._add_finding(
                opened.line, "tabs need two alternatives at least, each opened by a paragraph `**Title**`"
            )
        elif opened:
            self.tabs.append(replace(opened, end=line))

    def _open_tab(self, title: str, token: Token) -> None:
        assert self.open_tabs
        line = _line_range(token)[0] + 1
        between = self.lines[self.open_tabs.line : line - 1]
        if not self.open_tabs.tabs and any(text.strip() for text in between):
            self._add_finding(line, "the first thing inside tabs is a title, `**Title**`: move what stands before it")
        self.open_tabs = replace(self.open_tabs, tabs=(*self.open_tabs.tabs, LocatedText(title, line)))

    def _read_alert(self, token: Token) -> bool:
        """Notes an alert if this is the first paragraph of a blockquote and starts like one."""
        quote = self.before[0] if [one.type for one in self.before] == ["blockquote_open", "paragraph_open"] else None
        match = _ALERT.match(token.content) if quote else None
        if not (quote and match):
            return False
        first, last = _line_range(quote)
        last -= sum(1 for line in self.lines[first:last][::-1] if not line.strip())
        if match.group(1) not in ALERTS:
            self._add_finding(first + 1, f"unknown alert `[!{match.group(1)}]`: the alerts are {', '.join(ALERTS)}")
        self.alerts.append(Alert(match.group(1).lower(), first + 1, last))
        return True

    def _read_inline(self, token: Token) -> None:
        children = token.children or []
        self.prose.append(tuple(_prose_lines(token)))
        prose = "".join(_visible_text(child) for child in children)
        parent = self.before[-1].type if self.before else ""
        if parent == "heading_open":
            self.headings[-1] = replace(self.headings[-1], text=_heading_text(children))
        if not self._read_alert(token) and _ALERT_LIKE.search(prose):
            where = self._line_of(token, "[!")
            self._add_finding(
                where, "an alert is a blockquote whose first line is the marker alone, such as `> [!NOTE]`"
            )
        if self.open_tabs and token.level == 1 and parent == "paragraph_open" and (title := _bold_title(children)):
            self._open_tab(title, token)
        lone = token.level == 1 and parent == "paragraph_open" and _HOOK.fullmatch(token.content.strip())
        if lone:
            self.hooks.append(LocatedText(lone.group(1), _line_range(token)[0] + 1))
        else:
            self._add_prose(token, prose)
        if any(_MARKER_LIKE.match(match.group(1)) for match in _COMMENT.finditer(prose)):
            self._add_finding(
                self._line_of(token, "<!--"), "a doc-test marker inside a sentence: give it a line of its own"
            )
        for target in (target for child in children for target in _link_targets(child)):
            self.links.append(LocatedText(target, self._line_of(token, target)))

    def _add_prose(self, token: Token, prose: str) -> None:
        if match := _HOOK_LIKE.search(prose):
            where = self._line_of(token, match.group())
            self._add_finding(
                where, "an autodoc hook is a paragraph of one line, `{{ autodoc:Name }}`: move it to its own"
            )
        if match := _JSX_STYLE.search(prose):
            where = self._line_of(token, match.group())
            self._add_finding(
                where, "JSX `style={{` is not Markdown and shows as text: use plain Markdown or a CSS class"
            )
        if token.type == "html_block":
            self.links.extend(LocatedText(target, self._line_of(token, target)) for target in _HTML_LINK.findall(prose))

    def _line_of(self, token: Token, fragment: str) -> int:
        first, last = _line_range(token)
        return next((line + 1 for line in range(first, last) if fragment in self.lines[line]), first + 1)


def _needs_quotes(text: str) -> bool:
    """Whether YAML, as which GitHub reads the front matter, would take a plain text for something else."""
    return ": " in text or " #" in text or not text[0].isalnum()


def _line_range(token: Token) -> tuple[int, int]:
    first, last = token.map or (0, 0)
    return first, last


def _visible_text(child: Token) -> str:
    """What a reader sees of an inline token, code spans left out: they are literal."""
    if child.type in {"softbreak", "hardbreak"}:
        return "\n"
    return child.content if child.type in {"text", "html_inline"} else ""


def _prose_lines(token: Token) -> Iterator[LocatedText]:
    """What a reader reads of a paragraph, line by line, the descriptions of images included."""
    raw, done, text = token.content.replace("\n", " "), 0, ""
    first = line = _line_range(token)[0] + 1
    for child in token.children or []:
        where = raw.find(child.content, done) if child.content else -1
        done = where + len(child.content) if where >= 0 else done
        last = first + token.content.count("\n", 0, done) + (child.type in {"softbreak", "hardbreak"})
        if last > line:
            yield LocatedText(text, line)
            text, line = "", last
        if child.content:
            text += child.content if child.type in {"text", "image"} else OBJECT_REPLACEMENT
    yield LocatedText(text, line)


def _heading_text(children: list[Token]) -> str:
    """The text of a heading, code spans included."""
    return "".join(child.content for child in children if child.type in {"text", "code_inline"}).strip()


def _bold_title(children: list[Token]) -> str:
    """The text of a paragraph that is bold from end to end; empty for any other."""
    types = [child.type for child in children if child.type != "text" or child.content]
    inner = types[1:-1]
    is_bold = types[:1] == ["strong_open"] and types[-1:] == ["strong_close"] and "strong_close" not in inner
    return _heading_text(children) if is_bold else ""


def _link_targets(child: Token) -> Iterator[str]:
    attribute = {"link_open": "href", "image": "src"}.get(child.type)
    if attribute:
        yield str(child.attrs[attribute])
    elif child.type == "html_inline":
        yield from _HTML_LINK.findall(child.content)
