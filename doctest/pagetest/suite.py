"""The suite: the chosen pages in the chosen languages, each run as often as it must be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pagetest.checks import glossary, plugin_tables, translations
from pagetest.checks.command import NO_COMMAND
from pagetest.checks.figures import Figures
from pagetest.checks.glossary import Glossary
from pagetest.checks.hooks import HookChecker
from pagetest.checks.links import LinkChecker
from pagetest.checks.navigation import check_navigation
from pagetest.checks.parity import compare_structure
from pagetest.checks.plugin_tables import PluginTables
from pagetest.checks.rules import check_page
from pagetest.checks.translations import Translation, TranslationHashes
from pagetest.finding import Finding
from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.model.page import Page
from pagetest.model.script import make_script
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.outputs.updating import update_outputs
from pagetest.results.result import FAIL, NONE, Result, result_without_run
from pagetest.run.runner import Runner


@dataclass(frozen=True)
class Suite:
    """Pages and languages of a tree."""

    tree: Tree
    languages: Sequence[str]  # the languages that are asked for
    code: Path  # the folder that holds the packages which the pages are about
    update_outputs: bool = False  # whether stale output blocks are rewritten

    @cached_property
    def _link_checker(self) -> LinkChecker:
        return LinkChecker(self.tree)

    @cached_property
    def _glossary(self) -> Glossary:
        return Glossary(self.tree.source.parent / glossary.FILE)

    @cached_property
    def plugin_tables(self) -> PluginTables:
        """The tables about plugins."""
        return PluginTables(self.tree.source.parent / plugin_tables.FILE)

    @cached_property
    def _hook_checker(self) -> HookChecker:
        return HookChecker(ImportGraph(self.code))

    def check(self, names: Sequence[str]) -> list[Finding]:
        """All findings of the pages that need no run."""
        found = {finding for name in names for finding in self.check_one(name)}
        return sorted(found | set(self._check_files()))

    def check_one(self, name: str) -> list[Finding]:
        """The findings of one page in all its languages."""
        return sorted(set(self._check_languages(name)))

    def translations(self, names: Sequence[str]) -> list[Translation]:
        """The pages in the other languages than the original's."""
        languages = [language for language in self.languages if language != LANGUAGES[0]]
        return [Translation(self.tree, name, language) for name in names for language in languages]

    def run(self, names: Sequence[str], runner: Runner) -> Iterator[Result]:
        """Runs the pages; a translation with the same code reuses the run of its original."""
        for name in names:
            pages = self._pages(name)
            yield from (
                self.missing_page_result(name, language) for language in self.languages if language not in pages
            )
            original, before = None, None
            for page in pages.values():
                result, now = self.run_page(page, runner, original, before), page
                if self.update_outputs:
                    result, now = update_outputs(page, result, original or page, before)
                original, before = original or now, result
                yield result

    def run_page(
        self, page: Page, runner: Runner, original: Page | None = None, credit: Result | None = None
    ) -> Result:
        """Runs one page."""
        # A translation reuses `credit`, the result of its original, if the code is the same.
        mark = fingerprint(page, ImportGraph(self.code))
        return replace(self._check_and_run(page, runner, original, credit), fingerprint=mark)

    def missing_page_result(self, name: str, language: str) -> Result:
        """The result of a page that is not there."""
        path = self.tree.path(name, language)
        finding = Finding(path, 1, f"every page exists in {' and '.join(LANGUAGES)}, this one does not: translate it")
        return Result(name, language, path, FAIL, findings=(finding,))

    def _pages(self, name: str) -> dict[str, Page]:
        return {
            language: self.tree.page(name, language)
            for language in self.tree.languages(name)
            if language in self.languages
        }

    def _check_languages(self, name: str) -> Iterator[Finding]:
        pages = self._pages(name)
        for language in self.languages:
            if language not in pages:
                yield from self.missing_page_result(name, language).findings
        for page in pages.values():
            yield from check_page(page, make_script(page))
            yield from self._link_checker.faults(page)
            yield from self._hook_checker.faults(page)
            yield from self.plugin_tables.faults(page)
        original = pages.get(LANGUAGES[0])
        for page in pages.values():
            if page.language != LANGUAGES[0]:
                yield from self._glossary.misused_words(page)
            if original and page is not original:
                parity = compare_structure(original, page)
                yield from (*parity.findings, *parity.outputs)

    def _check_files(self) -> Iterator[Finding]:
        """What is wrong with the files next to the pages."""
        yield from check_navigation(self.tree)
        yield from self._glossary.faults()
        yield from Figures(self.tree).faults()
        for language in LANGUAGES[1:]:
            yield from TranslationHashes(self.tree.source / language / translations.FILE).faults(self.tree)

    def _check_and_run(self, page: Page, runner: Runner, original: Page | None, credit: Result | None) -> Result:
        script = make_script(page)
        findings = tuple(check_page(page, script))
        parity = compare_structure(original, page) if original else None
        if parity:
            findings += parity.findings + (() if self.update_outputs else parity.outputs)
        if findings:
            return result_without_run(page, script, FAIL, findings=findings)
        if page.command == NO_COMMAND and not script.shell:
            reasons = dict.fromkeys(block.reason for block in page.python)
            return result_without_run(page, script, NONE, f"not run: {'; '.join(reasons)}" if reasons else "no code")
        if credit and parity and parity.same_code:
            return credit.shared_with(page, script)
        return runner.run(page, script)
