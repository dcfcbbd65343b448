"""Figures: those of other languages are the English ones with translated labels, unless a script draws them in both."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape, unescape
from pathlib import Path
from typing import Any

from pagetest.finding import Finding, display_path
from pagetest.model.tree import LANGUAGES, Tree

FILE = "figures.json"
SCRIPTS = "figures"  # the folder next to the pages whose scripts draw figures in all languages

_FORM = '{"label": "translation"}, with a "#" for each number'
_LABEL = re.compile(r"(<text\b[^>]*>)([^<]+)(</text>)")
_NUMBER = re.compile(r"\d[\d,.]*(?<![,.])")
_WORD = re.compile(r"[a-z]{2}")
# how scripts name what they draw: def booster_overview, "concepts_world": draw_world, save("launch_turns"), "a.svg"
_DRAWN_BY_SCRIPT = re.compile(r'(?:def |save\("|"(?=\w+\.svg"|\w+": draw_))(\w+)')
_CODE_OR_NAME = re.compile(r"\S*[A-Z\d_.=()/]\S*")  # one word that is no plain one: all_reduce, LoRA, loss.backward()


@dataclass(frozen=True)
class FigureLabels:
    """The table of one language: `{"step #": "第 # 步"}`; numbers and code that stay need no row."""

    path: Path  # the table, which need not exist

    @cached_property
    def rows(self) -> Mapping[str, str]:
        """The translation of each label; none if the file is not valid."""
        content = self._content
        is_valid = isinstance(content, dict) and all(isinstance(text, str) and text for text in content.values())
        return content if is_valid else {}

    def faults(self, used: set[str]) -> Iterator[Finding]:
        """What is wrong with the file itself, given the labels that figures have."""
        if isinstance(self._content, json.JSONDecodeError):
            yield Finding(self.path, self._content.lineno, f"this is no JSON ({self._content.msg}): correct it")
        elif not self.rows and self._content != {}:
            yield Finding(self.path, 1, f"this is not of the form {_FORM}: correct it")
        for label, text in self.rows.items():
            if label not in used:
                yield Finding(self.path, self._line_of(label), f"no figure has the label `{label}`: remove the row")
            if label.count("#") != text.count("#"):
                yield Finding(self.path, self._line_of(label), f"`{text}` must have a # for each number of `{label}`")

    def missing(self, figure: str) -> list[str]:
        """The labels of a figure that have no translation, and need one."""
        return [label for label in labels(figure) if label not in self.rows and _needs_translation(label)]

    def translate(self, figure: str) -> str:
        """The figure with translated labels; nothing else of it changes."""
        return _LABEL.sub(
            lambda match: f"{match[1]}{escape(self._translated(match[2]), quote=False)}{match[3]}", figure
        )

    def _translated(self, text: str) -> str:
        label = unescape(text)
        found = self.rows.get(_without_numbers(label))
        numbers = iter(_NUMBER.findall(label))
        return label if found is None else re.sub("#", lambda _: next(numbers, "#"), found)

    @cached_property
    def _content(self) -> Any:
        if not self.path.is_file():
            return {}
        try:
            return json.loads(self.path.read_bytes())
        except json.JSONDecodeError as error:
            return error

    def _line_of(self, label: str) -> int:
        lines, key = self.path.read_text(encoding="utf-8").split("\n"), json.dumps(label, ensure_ascii=False)
        return next((number for number, line in enumerate(lines, 1) if f"{key}:" in line), 1)


@dataclass(frozen=True)
class Figures:
    """The figures of a tree that pages draw, in all languages."""

    tree: Tree

    def faults(self) -> Iterator[Finding]:
        """Labels without a translation, rows without a label, and figures that are not the translated English ones."""
        used = {label for file in self._originals for label in labels(_read(file))}
        for language in LANGUAGES[1:]:
            table = self._table(language)
            yield from table.faults(used)
            for original, figure in self._pairs(language):
                name, text = original.name, _read(original)
                missing = table.missing(text)
                for label in missing:
                    yield Finding(table.path, 1, f"the label `{label}` of {name} has no translation: add a row")
                if not missing and (not figure.is_file() or _read(figure) != table.translate(text)):
                    message = f"this is not {display_path(original)} with translated labels: `docs_test.py --figures`"
                    yield Finding(figure, 1, message)

    def write(self, drawn: Mapping[str, Path]) -> list[Path]:
        """Takes over newly drawn figures by name, and translates all; returns what has changed."""
        texts = [(file, _read(drawn[file.name])) for file in self._originals if file.name in drawn]
        changed = [file for file, text in texts if _write(file, text)]
        for language in LANGUAGES[1:]:
            table = self._table(language)
            pairs = [(figure, table.translate(_read(original))) for original, figure in self._pairs(language)]
            changed += [figure for figure, text in pairs if _write(figure, text)]
        return changed

    @cached_property
    def _originals(self) -> list[Path]:
        scripts = "".join(map(_read, sorted((self.tree.source.parent / SCRIPTS).glob("*.py"))))
        by_script = set(_DRAWN_BY_SCRIPT.findall(scripts))
        files = (self.tree.source / LANGUAGES[0]).rglob("*.svg")
        return sorted(file for file in files if file.stem not in by_script)

    def _table(self, language: str) -> FigureLabels:
        return FigureLabels(self.tree.source / language / FILE)

    def _pairs(self, language: str) -> Iterator[tuple[Path, Path]]:
        source = self.tree.source
        for original in self._originals:
            yield original, source / language / original.relative_to(source / LANGUAGES[0])


def labels(figure: str) -> list[str]:
    """The labels of a figure, as a table names them: with a # for each number."""
    return list(dict.fromkeys(_without_numbers(unescape(match[1])) for match in _LABEL.findall(figure)))


def _without_numbers(label: str) -> str:
    return _NUMBER.sub("#", label.strip())


def _needs_translation(label: str) -> bool:
    return bool(_WORD.search(label)) and not _CODE_OR_NAME.fullmatch(label.replace("#", "0"))


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _write(file: Path, text: str) -> bool:
    """Writes a file unless it has this text; returns whether it had another one."""
    if file.is_file() and _read(file) == text:
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return True
