"""What a check says: rows in sections, and whether the machine is usable."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal, final

JSON_VERSION = 1
"""Raised when a key of the JSON output changes its meaning or goes; new keys and rows may come at any time."""

Status = Literal["ok", "note", "problem", "skipped"]
"""Fine; usable, but there is something to know; not usable; not looked at because of a problem elsewhere."""


@final
@dataclass(frozen=True)
class Row:
    """One thing that was looked at."""

    section: str  # the group that it belongs to
    name: str  # what was looked at; unique in its section
    status: Status  # how it is
    found: str  # what was found, for people
    value: Any = None  # the same for programs: a number, a text, a truth value, a list of texts or None
    advice: str | None = None  # what to do about it; None if it is fine


@final
@dataclass(frozen=True)
class Section:
    """A part of the check: a title, and the function that looks."""

    title: str
    look: Callable[[], Iterable[Row]]

    def rows(self) -> Iterator[Row]:
        """Look; what goes wrong while looking is a problem, not the end of the check."""
        try:
            yield from self.look()
        except Exception as error:  # noqa: BLE001 (a broken library may raise anything)
            found = f"{type(error).__name__}: {_first_line(error)}"
            yield Row(
                self.title, "looking", "problem", found, advice="Install the packages anew; report it if it stays."
            )


@final
@dataclass(frozen=True)
class Report:
    """All rows of a check."""

    rows: tuple[Row, ...]

    @property
    def problems(self) -> tuple[Row, ...]:
        """The rows because of which the machine is not usable."""
        return tuple(row for row in self.rows if row.status == "problem")

    @property
    def usable(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"version": JSON_VERSION, "usable": self.usable, "rows": [asdict(row) for row in self.rows]}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "skipped": "dim"}
_MARKS = {"ok": "✓", "note": "!", "problem": "✗", "skipped": "-"}
_PLAIN_MARKS = _MARKS | {"ok": "+", "problem": "x"}
"""Where the encoding of the output has no check mark."""


def show(report: Report) -> None:
    """Print a report."""
    if sys.stdout.isatty():
        _show_table(report)
    else:
        print("\n".join(_lines(report)))  # noqa: T201 (printing is what was asked for)


def verdict(report: Report) -> str:
    """Say in a sentence whether the machine is usable."""
    count = len(report.problems)
    if report.usable:
        return "This machine can train with colossal."
    return f"This machine cannot train with colossal: {count} problem{'s' if count > 1 else ''}."


def _show_table(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console, marks = Console(highlight=False), _marks()
    table = Table(box=None, pad_edge=False, show_header=False)
    for section, rows in groupby(report.rows, key=lambda row: row.section):
        table.add_row("", f"[bold]{escape(section)}[/bold]", "")
        for row in rows:
            style = _STYLES[row.status]
            table.add_row(f"[{style}]{marks[row.status]} {row.status}[/{style}]", escape(row.name), escape(row.found))
    console.print(table)
    for row in _advised(report):
        style = _STYLES[row.status]
        console.print(f"[{style}]{row.status}[/{style}] {escape(_advice(row))}")
    console.print(f"[{'bold green' if report.usable else 'bold red'}]{verdict(report)}[/]")


def _lines(report: Report) -> list[str]:
    width, marks = max((len(row.name) for row in report.rows), default=0), _marks()
    lines = []
    for section, rows in groupby(report.rows, key=lambda row: row.section):
        lines += [section, *(f"  {marks[row.status]} {row.status:<8} {row.name:<{width}}  {row.found}" for row in rows)]
    advised = [f"{row.status}: {_advice(row)}" for row in _advised(report)]
    return [*lines, "", *advised, verdict(report)]


def _marks() -> dict[str, str]:
    try:
        "".join(_MARKS.values()).encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return _PLAIN_MARKS
    return _MARKS


def _advised(report: Report) -> list[Row]:
    """The rows with advice, the problems last, next to the verdict."""
    return sorted((row for row in report.rows if row.advice), key=lambda row: row.status == "problem")


def _advice(row: Row) -> str:
    return f"{row.section}, {row.name}: {row.found}. {row.advice}"
