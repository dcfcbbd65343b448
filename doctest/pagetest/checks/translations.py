"""Translations: which sections of a translated page are older than the original, and how that is acknowledged."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pagetest.finding import Finding, UsageError, display_path
from pagetest.model.page import Page
from pagetest.model.sections import Section, sections
from pagetest.model.tree import LANGUAGES, Tree

FILE = "translations.json"


class TranslationHashesError(UsageError):
    """The file is not of the right form; `finding` says where."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclass(frozen=True)
class TranslationHashes:
    """A JSON file that maps `page#slug` of the original to the hash of the translated section, line by line."""

    # The slugs show a reader of a change what was acknowledged; only the hashes count, so that a section may
    # move.

    path: Path  # the file, which need not exist

    def hashes_of(self, name: str) -> frozenset[str]:
        """The hashes of the sections of a page that are translated."""
        return frozenset(digest for key, digest in self._read().items() if _page(key) == name)

    def write(self, name: str, sections: Iterable[Section]) -> None:
        """Replaces the hashes of a page; the rest of the file stays."""
        kept = {key: digest for key, digest in self._read().items() if _page(key) != name}
        content = kept | {f"{name}#{section.slug}": section.hash for section in sections}
        text = _written(content)
        if not self.path.is_file() or self.path.read_text(encoding="utf-8") != text:
            fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self.path)

    def faults(self, tree: Tree) -> Iterator[Finding]:
        """What is wrong with the file itself."""
        try:
            content = self._read()
        except TranslationHashesError as error:
            yield error.finding
            return
        text = self.path.read_text(encoding="utf-8") if content else _written({})
        for name in sorted({_page(key) for key in content} - set(tree.names)):
            line = next(number for number, line in enumerate(text.split("\n"), 1) if f'"{name}#' in line)
            yield Finding(self.path, line, f"there is no page `{name}` any more: remove its hashes")
        if text != _written(content):
            yield Finding(self.path, 1, "the hashes are not sorted, one in a line: any --ack sorts them")

    def _read(self) -> dict[str, str]:
        try:
            content: Any = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except json.JSONDecodeError as error:
            message = f"this is no JSON ({error.msg}): restore it, or remove it and --ack what is translated"
            raise TranslationHashesError(Finding(self.path, error.lineno, message)) from None
        if not isinstance(content, dict) or not all(isinstance(digest, str) for digest in content.values()):
            raise TranslationHashesError(
                Finding(self.path, 1, 'this is not of the form {"page#section": "hash"}: restore it')
            )
        return content


def _written(content: Mapping[str, str]) -> str:
    return json.dumps(dict(sorted(content.items())), indent=1, ensure_ascii=False) + "\n"


def _page(key: str) -> str:
    return key.partition("#")[0]


@dataclass(frozen=True)
class StaleSection:
    """A section whose original has changed since it was translated."""

    original: Section
    translated: Section  # its counterpart: the section at the same place


def stale_sections(tree: Tree, name: str, language: str = LANGUAGES[1]) -> list[tuple[str, str, int]]:
    """The sections of a translation that are older than the original, for display."""
    # Each is the original's heading, the translation's, and its line; none where a page is missing.
    translation = Translation(tree, name, language)
    stale = translation.stale_sections() if translation.exists else []
    return [(section.original.heading, section.translated.heading, section.translated.line) for section in stale]


@dataclass(frozen=True)
class Translation:
    """A page in another language than the original's."""

    tree: Tree  # the tree that holds both
    name: str
    language: str

    def faults(self) -> Iterator[Finding]:
        """The sections that are older, and what makes the two pages incomparable."""
        fault = self._structure()
        if fault:
            yield fault
        if self.exists:
            path, original = self.tree.path(self.name, self.language), self.tree.path(self.name, LANGUAGES[0])
            for section in self.stale_sections():
                where = f"{display_path(original)}:{section.original.line}"
                message = (
                    f'section "{section.translated.heading}" is older than {where}: translate what changed, then --ack'
                )
                yield Finding(path, section.translated.line, message)

    def stale_sections(self) -> list[StaleSection]:
        """The sections of the original whose wording was never acknowledged; moving one does not change its wording."""
        known = self._hashes.hashes_of(self.name)
        pairs = _pair_sections(self._sections(LANGUAGES[0]), self._sections(self.language))
        return [StaleSection(one, other) for one, other in pairs if one.hash not in known]

    def acknowledge(self) -> Finding | None:
        """Records every section of the original as translated; returns the finding that forbids it, if any."""
        fault = self._structure()
        if not fault:
            self._hashes.write(self.name, self._sections(LANGUAGES[0]))
        return fault

    @property
    def exists(self) -> bool:
        """Whether there is the page and its original."""
        return {LANGUAGES[0], self.language} <= set(self.tree.languages(self.name))

    @property
    def _hashes(self) -> TranslationHashes:
        return TranslationHashes(self.tree.source / self.language / FILE)

    def _page(self, language: str) -> Page:
        return self.tree.page(self.name, language)

    def _sections(self, language: str) -> tuple[Section, ...]:
        return sections(self._page(language))

    def _structure(self) -> Finding | None:
        """The first heading in which the two pages differ."""
        path = self.tree.path(self.name, self.language)
        if not self.exists:
            missing = next(lang for lang in (LANGUAGES[0], self.language) if lang not in self.tree.languages(self.name))
            return Finding(self.tree.path(self.name, missing), 1, "this page exists in another language only: write it")
        ours, theirs = self._page(LANGUAGES[0]), self._page(self.language)
        for one, other in zip_longest(ours.headings, theirs.headings):
            if not one or not other or one.level != other.level:
                line, where = other.line if other else len(theirs.lines), one.line if one else len(ours.lines)
                message = (
                    f"from here on the headings differ from {display_path(ours.path)}:{where}: give both pages the same"
                )
                return Finding(path, line, message)
        return None


def _pair_sections(ours: tuple[Section, ...], theirs: tuple[Section, ...]) -> Iterator[tuple[Section, Section]]:
    """Each section of the original with the translation's one at its place, or the last one where that has ended."""
    theirs = theirs or (Section("", "", 1, 0, ""),)
    headed, place = [section for section in theirs if section.level], 0
    for section in ours:
        if section.level:
            yield section, headed[place] if place < len(headed) else theirs[-1]
            place += 1
        else:
            yield section, theirs[0]
