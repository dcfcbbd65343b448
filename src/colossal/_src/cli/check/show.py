"""A report as people read it: a table on a terminal, plain lines in a file or a pipe."""

import sys
from itertools import groupby

from colossal._src.cli.check.report import Report, Row

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
