"""Figures: what pages draw is stored in English, and has translated labels where a page of another language is built.

A page of another language links the English figure, which readers of the repository see. A figure that the language has
itself, drawn by a script, is taken as it is.
"""

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
_ENGLISH, _OWN = f"../{LANGUAGES[0]}/images/", "images/"  # what a page of another language links, and what is built
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
    """The figures of a tree that pages draw, in English; other languages show them with translated labels."""

    tree: Tree

    def faults(self) -> Iterator[Finding]:
        """Labels without a translation, rows without a label, and translated figures, which nobody would renew."""
        used = {label for file in self._originals for label in labels(_read(file))}
        for language in LANGUAGES[1:]:
            table = self._table(language)
            yield from table.faults(used)
            for original in self._originals:
                for label in table.missing(_read(original)):
                    message = f"the label `{label}` of {original.name} has no translation: add a row"
                    yield Finding(
                        table.path, 1, f"the label `{label}` of {original.name} has no translation: add a row"
                    )
                if (stored := self._place(original, language)).is_file():
                    message = f"the page draws this figure, in English: remove it, and link {display_path(original)}"
                    yield Finding(stored, 1, message)

    def write(self, drawn: Mapping[str, Path]) -> list[Path]:
        """Takes over newly drawn figures by name; returns what has changed."""
        texts = [(file, _read(drawn[file.name])) for file in self._originals if file.name in drawn]
        return [file for file, text in texts if _write(file, text)]

    def translated(self, language: str) -> Iterator[tuple[str, bytes]]:
        """The figures that a language takes from English, by their place below its folder."""
        for original in self._drawings if language != LANGUAGES[0] else ():
            if not self._place(original, language).is_file():
                yield original.relative_to(self._english).as_posix(), self.shown(original, language)

    def shown(self, file: Path, language: str) -> bytes:
        """An image as a page of a language shows it."""
        is_foreign = language != LANGUAGES[0] and file.suffix == ".svg" and file.is_relative_to(self._english)
        return self._table(language).translate(_read(file)).encode() if is_foreign else file.read_bytes()

    @cached_property
    def _english(self) -> Path:
        return self.tree.source / LANGUAGES[0]

    @cached_property
    def _originals(self) -> list[Path]:
        scripts = "".join(map(_read, sorted((self.tree.source.parent / SCRIPTS).glob("*.py"))))
        by_script = set(_DRAWN_BY_SCRIPT.findall(scripts))
        return [file for file in self._drawings if file.stem not in by_script]

    @cached_property
    def _drawings(self) -> list[Path]:
        """All figures in English; what is in hidden folders is none."""
        found = sorted(self._english.rglob("*.svg"))
        return [file for file in found if not re.search(r"/[._]", f"/{file.relative_to(self._english).as_posix()}")]

    def _table(self, language: str) -> FigureLabels:
        return FigureLabels(self.tree.source / language / FILE)

    def _place(self, original: Path, language: str) -> Path:
        """Where a language would have the figure itself."""
        return self.tree.source / language / original.relative_to(self._english)


def own_address(line: str) -> str:
    """A line of a page as it is built: with the language's own figure in the place of the English one."""
    return line.replace(_ENGLISH, _OWN)


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
