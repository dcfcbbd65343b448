"""Editions: the documentation as it is now, and as it was when each version was released."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pagebuild.api.contents import Contents, from_json
from pagebuild.runs import record_folders
from pagetest.finding import Finding
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.results.records import FOLDER_NAME

CURRENT = "current"

_CONTENT = "docusaurus-plugin-content-docs"


class BrokenInputError(Exception):
    """Files of the documentation are missing or wrong."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


@dataclass(frozen=True)
class Edition:
    """The pages of one version, and what belongs to them."""

    version: str  # `current`, or the released version
    tree: Tree
    sidebars: Path
    api: Path
    records: tuple[Path, ...]

    @property
    def is_current(self) -> bool:
        """Whether this is the documentation that is still written on."""
        return self.version == CURRENT

    @cached_property
    def reference(self) -> dict[str, Any]:
        """The content of the API reference."""
        return read_json(self.api, "run `python docs_build.py api`" if self.is_current else "restore it from git")

    @property
    def objects(self) -> dict[str, Any]:
        """The documented objects by name."""
        return self.reference["objects"]

    @cached_property
    def contents(self) -> Contents:
        """The pages of the API reference."""
        return from_json(self.reference["contents"])

    def pages(self) -> Iterator[Page]:
        """Every page in every language that it exists in."""
        for name in self.tree.names:
            yield from (self.tree.page(name, language) for language in self.tree.languages(name))

    @property
    def downloads(self) -> str:
        """The folder of the site that holds what readers download."""
        return "downloads" if self.is_current else f"downloads/{self.version}"

    def folder(self, language: str) -> str:
        """Where the website expects the pages of a language."""
        if language == LANGUAGES[0]:
            return "docs" if self.is_current else f"versioned_docs/version-{self.version}"
        return f"i18n/{language}/{_CONTENT}/{self._stem}"

    @property
    def sidebars_target(self) -> str:
        """Where the website expects the sidebars."""
        return "sidebars.json" if self.is_current else f"versioned_sidebars/{self._stem}-sidebars.json"

    @property
    def api_target(self) -> str:
        """Where the website expects the API reference."""
        return "data/api.json" if self.is_current else f"data/versions/{self.version}/api.json"

    def labels_target(self, language: str) -> str:
        """Where the website expects the labels of the sidebars in a language."""
        return f"{self.folder(language)}.json"

    @property
    def _stem(self) -> str:
        return CURRENT if self.is_current else f"version-{self.version}"


def current_edition(root: Path) -> Edition:
    """The documentation as it is now."""
    docs, build = root / "docs", root / "build" / "docs"
    tree, records = Tree(docs / "source"), record_folders(root, docs)
    return Edition(CURRENT, tree, docs / "sidebars.json", build / "api.json", records)


def released_editions(root: Path) -> list[Edition]:
    """The frozen documentation of the released versions, the newest first."""
    return [_read_frozen_edition(root, version) for version in released_versions(root)]


def released_versions(root: Path) -> list[str]:
    """The released versions, the newest first."""
    path = root / "docs" / "versions.json"
    versions = read_json(path, f'write `["{CURRENT}"]`')
    is_list = isinstance(versions, list) and all(isinstance(version, str) for version in versions)
    if not is_list or versions[:1] != [CURRENT] or len(set(versions)) != len(versions):
        message = f'the list is `"{CURRENT}"` and then each released version once, newest first; found {versions!r}'
        raise BrokenInputError(Finding(path, 1, message))
    return versions[1:]


def frozen_folder(root: Path, version: str) -> Path:
    """Where the frozen documentation of a version is kept."""
    return root / "docs" / "versioned" / version


def read_json(path: Path, remedy: str) -> Any:
    """Reads a file of JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenInputError(Finding(path, 1, f"the file is missing: {remedy}")) from None
    except json.JSONDecodeError as error:
        raise BrokenInputError(Finding(path, error.lineno, f"this is no JSON ({error.msg}): {remedy}")) from None


def _read_frozen_edition(root: Path, version: str) -> Edition:
    folder = frozen_folder(root, version)
    if missing := list(_missing_files(folder)):
        raise BrokenInputError(*missing)
    return Edition(version, Tree(folder), folder / "sidebars.json", folder / "api.json", (folder / FOLDER_NAME,))


def _missing_files(folder: Path) -> Iterator[Finding]:
    for name in (*LANGUAGES, "sidebars.json", "api.json", FOLDER_NAME):
        if not (folder / name).exists():
            yield Finding(
                folder / name, 1, "docs/versions.json names this version: restore the folder, or drop the name"
            )
