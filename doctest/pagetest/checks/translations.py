"""Translations: which sections of a translated page lag behind the original, and how that is acknowledged."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from pagetest.checks.stamps import FILE, TranslationHashes
from pagetest.finding import Finding, display_path
from pagetest.model.page import Page
from pagetest.model.sections import Section, sections
from pagetest.model.tree import LANGUAGES, Tree


@dataclass(frozen=True)
class StaleSection:
    """A section whose original has changed since it was translated.

    Attributes:
        original: The section of the original.
        translated: Its counterpart: the section at the same place.
    """

    original: Section
    translated: Section


def stale_sections(tree: Tree, name: str, language: str = LANGUAGES[1]) -> list[tuple[str, str, int]]:
    """The sections of a translation that are behind the original, for those who show them.

    Returns:
        For each the original's heading, the translation's, and the line of the latter. None where a page is missing.
    """
    translation = Translation(tree, name, language)
    lags = translation.stale_sections() if translation.exists else []
    return [(lag.original.heading, lag.translated.heading, lag.translated.line) for lag in lags]


@dataclass(frozen=True)
class Translation:
    """A page in another language than the original's.

    Attributes:
        tree: The tree that holds both.
        name: The page.
        language: The language of the translation.
    """

    tree: Tree
    name: str
    language: str

    def faults(self) -> Iterator[Finding]:
        """The sections that are behind, and what makes the two pages incomparable."""
        fault = self._structure()
        if fault:
            yield fault
        if self.exists:
            path, original = self.tree.path(self.name, self.language), self.tree.path(self.name, LANGUAGES[0])
            for lag in self.stale_sections():
                where = f"{display_path(original)}:{lag.original.line}"
                message = f'section "{lag.translated.heading}" is behind {where}: translate what changed, then --ack'
                yield Finding(path, lag.translated.line, message)

    def stale_sections(self) -> list[StaleSection]:
        """The sections of the original whose wording was never acknowledged; moving one does not change its wording."""
        known = self._stamps.hashes_of(self.name)
        pairs = _pair_sections(self._sections(LANGUAGES[0]), self._sections(self.language))
        return [StaleSection(one, other) for one, other in pairs if one.hash not in known]

    def acknowledge(self) -> Finding | None:
        """Stamps every section of the original as translated; what forbids it is returned instead."""
        fault = self._structure()
        if not fault:
            self._stamps.write(self.name, self._sections(LANGUAGES[0]))
        return fault

    @property
    def exists(self) -> bool:
        """Whether there is the page and its original."""
        return {LANGUAGES[0], self.language} <= set(self.tree.languages(self.name))

    @property
    def _stamps(self) -> TranslationHashes:
        return TranslationHashes(self.tree.source / self.language / FILE)

    def _page(self, language: str) -> Page:
        return self.tree.page(self.name, language)

    def _sections(self, language: str) -> tuple[Section, ...]:
        return sections(self._page(language))

    def _structure(self) -> Finding | None:
        """The first heading that the two pages do not share."""
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
