"""The source folder of one language's Sphinx site: pages, pictures, the reference, and the pages that lead to them."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagebuild.api.inventory import Inventory
from pagebuild.runs import FindRun, shown_run
from pagebuild.sphinx.modules import module_page
from pagebuild.sphinx.myst import MystPage, to_myst
from pagebuild.sphinx.texts import texts_of
from pagetest.checks.navigation import LABELS
from pagetest.model.tree import Tree


@dataclass(frozen=True)
class SphinxSources:
    """Writes what Sphinx reads."""

    tree: Tree
    inventory: Inventory
    folder: Path
    locales: Path
    modules: Sequence[str]  # the modules that the reference describes
    find_run: FindRun  # the run of a page that holds

    def write(self, language: str) -> Mapping[Path, tuple[Path, MystPage]]:
        """Writes the sources of one language anew; returns per page the author's file and how lines were moved."""
        target = self.folder / language
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        written = dict(self._write_pages(language, target))
        if (pictures := self.tree.source / language / "images").is_dir():
            shutil.copytree(pictures, target / "images")
        shutil.copytree(self.locales, target / "locale")
        (target / "api").mkdir()
        for module in self.modules:
            (target / "api" / f"{module}.rst").write_text(module_page(module, self.inventory), encoding="utf-8")
        (target / "index.md").write_text("\n".join(self._index(language)), encoding="utf-8")
        (target / "api" / "index.md").write_text("\n".join(self._api_index(language)), encoding="utf-8")
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
            yield from _toctree(label, names)
        yield from _toctree(texts.reference, ["api/index"])

    def _api_index(self, language: str) -> Iterator[str]:
        yield from (f"# {texts_of(language).api}", "")
        yield from _toctree("", list(self.modules))

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


def _toctree(caption: str, names: list[str]) -> Iterator[str]:
    options = [f":caption: {caption}"] if caption else []
    yield from ("```{toctree}", ":maxdepth: 1", *options, "", *names, "```", "")
