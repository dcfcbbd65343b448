"""The errors and warnings of Docusaurus, at the author's files and lines."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagebuild.site.front_matter import NUM_LINES
from pagetest.finding import Finding
from pagetest.model.reader import read_page

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_AUTHORED = re.compile(r"(docs/(?:source|versioned)/[^\s:\"]+\.md):(\d+): ([^\"\n]+)")
_UNRESOLVED = re.compile(r"(Markdown (?:link|image) with URL `[^`]*`) in source file \"([^\"]+)\" \((\d+):\d+\)")
_DIRECTIVES = re.compile(r"unused Markdown directives in file \"([^\"]+)\"((?:\n- \S+ \(\d+:\d+\))+)")
_DIRECTIVE = re.compile(r"- (\S+) \((\d+):\d+\)")
_BROKEN = re.compile(r"Broken (link|anchor) on source page path = (\S+?):?\n((?:\s*-> linking to [^\n]+\n?)+)")
_TARGET = re.compile(r"-> linking to (\S+)(?: \(resolved as: (\S+)\))?")
_ROUTE = re.compile(r"/(?:(zh-Hans)/)?docs/(?:(next|[0-9][^/]*)/)?(.*?)/?$")
_FOLDERS = ("docs", "i18n/zh-Hans/docusaurus-plugin-content-docs/current")


@dataclass(frozen=True)
class BuildErrorLocator:
    """Finds the author's place for one of the website."""

    root: Path
    website: Path

    def findings(self, log: str) -> list[Finding]:
        """Every complaint of a build, once."""
        text = re.sub(r"(?m)^\s*\u2502 ?", "", _COLOR.sub("", log))
        parts = (self._plugin_findings, self._unresolved_links, self._unused_directives, self._broken_links)
        return sorted({finding for part in parts for finding in part(text)})

    def _plugin_findings(self, text: str) -> Iterator[Finding]:
        """What our own plugins say: it names the author's file already."""
        for file, line, message in _AUTHORED.findall(text):
            yield Finding(self.root / file, int(line), message.strip())

    def _unresolved_links(self, text: str) -> Iterator[Finding]:
        for what, file, line in _UNRESOLVED.findall(text):
            yield self._finding(self.website / file, int(line), f"{what} leads to nothing: correct it")

    def _unused_directives(self, text: str) -> Iterator[Finding]:
        for file, list_ in _DIRECTIVES.findall(text):
            for name, line in _DIRECTIVE.findall(list_):
                message = f"`{name}` is no Markdown and shows as text: write an alert, `> [!NOTE]`, or plain text"
                yield self._finding(self.website / file, int(line), message)

    def _broken_links(self, text: str) -> Iterator[Finding]:
        for what, route, targets in _BROKEN.findall(text):
            file = self._page_of_route(route)
            for target, resolved in _TARGET.findall(targets):
                message = f"the {what} `{target}` leads to nothing: correct it"
                if file is None:
                    yield Finding(self.website, 1, f"{route}: {message}")
                else:
                    yield self._finding(file, self._line_of_link(file, resolved or target), message)

    def _finding(self, file: Path, line: int, message: str) -> Finding:
        source = self._author_file(file)
        if source is None:
            return Finding(file, line, message)
        return Finding(self.root / source, max(1, line - NUM_LINES), message)

    @staticmethod
    def _author_file(file: Path) -> str | None:
        """The author's file of a generated page; None for a page that has no author's file."""
        if not file.is_file():
            return None
        page = json.loads(file.read_text(encoding="utf-8").split("\n")[1])["page"]
        return page["source"] if page["kind"] == "tutorial" else None

    def _page_of_route(self, route: str) -> Path | None:
        """The generated page of an address, whichever version has the addresses without one."""
        match = _ROUTE.search(route)
        if not match:
            return None
        language, version, name = match.groups()
        released = sorted((self.website / "versioned_docs").glob("version-*"), reverse=True)
        names = [version] if version and version != "next" else [path.name[8:] for path in released if not version]
        folders = [
            *(f"versioned_docs/version-{name}" for name in names if not language),
            *(f"i18n/zh-Hans/docusaurus-plugin-content-docs/version-{name}" for name in names if language),
            _FOLDERS[1] if language else _FOLDERS[0],
        ]
        files = (self.website / folder / f"{name}.md" for folder in folders)
        return next((file for file in files if file.is_file()), None)

    @staticmethod
    def _line_of_link(file: Path, target: str) -> int:
        """The line of the link; the addresses that Docusaurus prints end as the author's target does."""
        path, _, anchor = target.rstrip("/").partition("#")
        stem = path.rstrip("/").rpartition("/")[2]
        for link in read_page(file, "", "").links:
            link_path, _, link_anchor = link.text.partition("#")
            link_stem = link_path.rstrip("/").rpartition("/")[2].removesuffix(".md")
            if link_anchor == anchor and link_stem in {stem, ""}:
                return link.line
        return NUM_LINES + 1
