"""The source folder of one language's Sphinx site: pages, pictures, the reference, and the pages that lead to them."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagebuild.api.contents import API_FOLDER, Contents
from pagebuild.api.inventory import Inventory
from pagebuild.runs import FindRun, shown_run
from pagebuild.sphinx.myst import MystPage, to_myst
from pagebuild.sphinx.reference import reference_pages, toctree
from pagebuild.sphinx.texts import texts_of
from pagetest.checks.figures import Figures
from pagetest.checks.navigation import LABELS
from pagetest.model.tree import Tree


@dataclass(frozen=True)
class SphinxSources:
    """Writes what Sphinx reads."""

    tree: Tree
    inventory: Inventory
    folder: Path
    locales: Path
    contents: Contents  # the pages of the reference
    find_run: FindRun  # the run of a page that holds

    def write(self, language: str) -> Mapping[Path, tuple[Path, MystPage]]:
        """Writes the sources of one language anew; returns per page the author's file and how lines were moved."""
        target = self.folder / language
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        written = dict(self._write_pages(language, target))
        if (pictures := self.tree.source / language / "images").is_dir():
            shutil.copytree(pictures, target / "images")
        for place, content in Figures(self.tree).translated(language):
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            (target / place).write_bytes(content)
        shutil.copytree(self.locales, target / "locale")
        (target / API_FOLDER).mkdir()
        for name, text in reference_pages(self.contents, self.inventory, language).items():
            (target / API_FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
        (target / "index.md").write_text("\n".join(self._index(language)), encoding="utf-8")
        return written

    def _write_pages(self, language: str, target: Path) -> Iterator[tuple[Path, tuple[Path, MystPage]]]:
        for name in self.tree.names:
            if language in self.tree.languages(name):
                page = self.tree.page(name, language)
                path, made = target / f"{name}.md", to_myst(page, shown_run(page, self.find_run))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(made.text, encoding="utf-8")
                yield path, (page.path, made)

    def _index(self, language: str) -> Iterator[str]:
        texts = texts_of(language)
        yield from ("# colossal", "", texts.summary, "")
        for label, names in self._categories(language):
            yield from toctree(label, names)
        groups = ["index", *(group.name for group in self.contents.groups)]
        yield from toctree(texts.api, [f"{API_FOLDER}/{name}" for name in groups])

    def _categories(self, language: str) -> Iterator[tuple[str, list[str]]]:
        """The sidebar's categories with the labels of the language, in their order."""
        sidebars = _read(self.tree.source.parent / "sidebars.json")
        labels = _read(self.tree.source / language / LABELS)
        for sidebar, items in sidebars.items():
            for item in items:
                label = labels.get(f"sidebar.{sidebar}.category.{item['label']}", {}).get("message", item["label"])
                yield label, [name for name in item["items"] if name in self.tree.names]


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
