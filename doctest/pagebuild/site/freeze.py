"""Freezes the present documentation as that of a released version."""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pagebuild.runs import DEVICES
from pagebuild.site.badges import VERIFIED
from pagebuild.site.coverage import Coverage, current_coverage
from pagebuild.site.edition import (
    CURRENT,
    BrokenInputError,
    Edition,
    current_edition,
    frozen_folder,
    read_json,
    released_versions,
)
from pagetest.finding import Finding, display_path, with_count
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES
from pagetest.results.records import FOLDER_NAME, Records
from pagetest.results.run_finder import RecordedRun
from pagetest.suite import Suite

_VERSION = re.compile(r"[0-9]+(\.[0-9]+)+((a|b|rc)[0-9]+)?(\.post[0-9]+)?")


@dataclass(frozen=True)
class DocumentationFreezer:
    """Freezes the documentation of a project."""

    root: Path
    coverage: Coverage

    def freeze(self, version: str) -> Path:
        """Copies pages, sidebars, reference and results, adds the version to the list, and returns the new folder."""
        # A version that is frozen already, or a page that is not verified, raises BrokenInputError; nothing
        # has changed then.
        edition = current_edition(self.root)
        if findings := [*self._version_faults(version, edition), *self._page_faults(edition)]:
            raise BrokenInputError(*findings)
        folder = frozen_folder(self.root, version)
        partial = folder.with_name(f".{version}")
        shutil.rmtree(partial, ignore_errors=True)
        self._copy(edition, partial)
        partial.rename(folder)
        self._add_version(version)
        return folder

    def _version_faults(self, version: str, edition: Edition) -> Iterator[Finding]:
        folder, list_ = frozen_folder(self.root, version), self.root / "docs" / "versions.json"
        if not _VERSION.fullmatch(version):
            yield Finding(list_, 1, f"`{version}` is no version such as 0.1.0: write numbers with dots")
        if version in released_versions(self.root) or folder.exists():
            yield Finding(
                folder, 1, f"{version} is frozen already, and what is released stays as it is: take the next number"
            )
        if edition.reference["version"] != version:
            found = edition.reference["version"]
            message = (
                f"this is the reference of {found}, not of {version}: set the version, run `python docs_build.py api`"
            )
            yield Finding(edition.api, 1, message)

    def _page_faults(self, edition: Edition) -> Iterator[Finding]:
        """Everything that keeps a page from being verified in this version."""
        yield from Suite(edition.tree, LANGUAGES, self.root / "src").check(edition.tree.names)
        for page in edition.pages():
            yield from self._unverified(page)
            yield from (
                Finding(page.path, 1, f'the section "{heading}" is older than its original: translate it, then --ack')
                for heading in self.coverage.stale_headings(page)
            )

    def _unverified(self, page: Page) -> Iterator[Finding]:
        """Why the page is not verified on a CPU."""
        badge = next((one for one in self.coverage.results.badges(page) if one["device"] == DEVICES[0]), None)
        if page.executed and (badge is None or badge["state"] != VERIFIED):
            state = badge["state"] if badge else "never run"
            yield Finding(page.path, 1, f"the page is not verified ({state}): run `nox -s doctest`")
        elif badge and "commit" in badge and (badge["commit"].endswith("-dirty") or not badge["commit"]):
            yield Finding(page.path, 1, "the page ran with changes that no commit holds: commit, run `nox -s doctest`")

    def _copy(self, edition: Edition, folder: Path) -> None:
        for language in LANGUAGES:
            source = edition.tree.source / language
            shutil.copytree(source, folder / language, ignore=shutil.ignore_patterns(".*", "_*"))
        shutil.copyfile(edition.sidebars, folder / "sidebars.json")
        shutil.copyfile(edition.api, folder / "api.json")
        kept = Records(folder / FOLDER_NAME)
        kept.folder.mkdir()
        for page, device in product(edition.pages(), DEVICES):
            if page.executed and (run := self.coverage.results.find_run(page, device)):
                kept.write(_release_record(page, run))

    def _add_version(self, version: str) -> None:
        path = self.root / "docs" / "versions.json"
        versions = read_json(path, f'write `["{CURRENT}"]`')
        path.write_text(json.dumps([CURRENT, version, *versions[1:]]) + "\n", encoding="utf-8")


def _release_record(page: Page, run: RecordedRun) -> dict[str, Any]:
    """The record of a page in a release: that of its run, which may be its original's, without the figures."""
    blocks = [{"printed": printed, "figures": []} for printed in run.printed]
    return {key: value for key, value in run.record.items() if key != "warnings"} | {
        "lang": page.language,
        "blocks": blocks,
    }


def configure(parser: argparse.ArgumentParser, root: Path) -> None:
    """Adds the options."""
    del root
    parser.add_argument("version", metavar="VERSION", help="the version that is released, such as 0.1.0")


def run(options: argparse.Namespace, root: Path) -> int:
    """Runs the subcommand; returns 0 if the version is frozen, 1 if it may not be."""
    try:
        folder = DocumentationFreezer(root, current_coverage(root)).freeze(options.version)
    except BrokenInputError as error:
        sys.stdout.write(f"{error}\n{with_count(len(error.findings), 'finding')}; nothing was frozen\n")
        return 1
    sys.stdout.write(f"{display_path(folder)}: commit it with docs/versions.json\n")
    return 0
