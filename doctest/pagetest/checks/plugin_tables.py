"""Tables about plugins: every page that helps to choose one says what one file says."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pagetest.finding import Finding
from pagetest.model.page import Page
from pagetest.outputs.updating import replace_file

FILE = "plugins.toml"

_BEGIN = re.compile(r"<!-- plugins(?: of ([\w, ]+))?: ([\w, ]+) -->")
_END = "<!-- /plugins -->"

# [Note: tables on pages]
# `<!-- plugins: when, name -->` begins a table with these columns and a row for each plugin, `<!-- /plugins -->` ends
# it. `plugins of zero, fsdp: ...` has these rows only, in this order. What stands between is written by `--tables`, so
# that it reads well on GitHub, and compared by `--check`.


@dataclass(frozen=True)
class PluginTables:
    """The tables that one file describes."""

    path: Path

    @cached_property
    def content(self) -> Mapping[str, Any]:
        """The columns and the plugins; none where there is no file."""
        if not self.path.is_file():
            return {"columns": {}, "plugin": []}
        return tomllib.loads(self.path.read_text(encoding="utf-8"))

    @property
    def plugins(self) -> Mapping[str, Mapping[str, Any]]:
        """The plugins by their keys."""
        return {plugin["key"]: plugin for plugin in self.content["plugin"]}

    def faults(self, page: Page) -> Iterator[Finding]:
        """Tables that are not what the file says, and markers that name something else."""
        for first, last, rows, columns in _tables(page):
            unknown = [*(set(rows) - self.plugins.keys()), *(set(columns) - self.content["columns"].keys())]
            if last is None:
                yield Finding(page.path, first, f"the table is never closed: add `{_END}` after it")
            elif unknown:
                where = self.path.name
                yield Finding(page.path, first, f"{where} has no `{unknown[0]}`: correct the marker")
            elif list(page.lines[first : last - 1]) != self._table(page.language, rows, columns):
                message = f"this table is not what {self.path.name} says: run `docs_test.py --tables`"
                yield Finding(page.path, first, message)

    def write(self, page: Page) -> bool:
        """Writes the tables of a page anew; returns whether that changed it."""
        lines = list(page.lines)
        for first, last, rows, columns in reversed(list(_tables(page))):
            if last is not None:
                lines[first : last - 1] = self._table(page.language, rows, columns)
        if lines == list(page.lines):
            return False
        replace_file(page.path, "\n".join(lines).encode())
        return True

    def _table(self, language: str, rows: list[str], columns: list[str]) -> list[str]:
        titles = [self.content["columns"][column][language] for column in columns]
        cells = [
            [_cell(self.plugins[row], column, language) for column in columns] for row in rows or list(self.plugins)
        ]
        return [_row(titles), _row(["---"] * len(columns)), *map(_row, cells)]


def _tables(page: Page) -> Iterator[tuple[int, int | None, list[str], list[str]]]:
    """The line of each marker, that of its end, and the rows and columns that it asks for."""
    for number, line in enumerate(page.lines, 1):
        if match := _BEGIN.fullmatch(line.strip()):
            after = (place for place, text in enumerate(page.lines[number:], number + 1) if text.strip() == _END)
            yield number, next(after, None), _names(match.group(1) or ""), _names(match.group(2))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(plugin: Mapping[str, Any], column: str, language: str) -> str:
    if column == "name":
        code = f"`{plugin['name']}`" if plugin["name"] else "`Booster()`"
        return f"[{code}](../{plugin['page']}.md)"
    text = plugin[language].get(column) or plugin[column]
    return re.sub(r"\]\((?=\w)", "](../", text)
