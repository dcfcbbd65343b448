"""The results of a benchmark as people read them: a table on a terminal, plain columns in a file or a pipe."""

import sys
from collections.abc import Iterable, Mapping, Sequence

from colossal._src.cli.benchmark.measure import Result, columns_of
from colossal._src.cluster import LinkCost

_LEFT = ("case", "parallelism", "axis", "operation")


def show_cases(results: Sequence[Result], title: str) -> None:
    """Print the measured cases."""
    _show(title, [columns_of(result, list(results)) for result in results])


def show_links(costs: LinkCost, title: str) -> None:
    """Print the measured links."""
    _show(title, list(_link_rows(costs)))


def _link_rows(costs: LinkCost) -> Iterable[Mapping[str, str]]:
    for axis, cost in costs.axes.items():
        for op, link in [*cost.ops.items(), ("all together", cost.link)]:
            yield {
                "axis": axis,
                "ranks": str(cost.size),
                "operation": op,
                "alpha, us": f"{1e6 * link.alpha:.1f}",
                "beta, ns/B": f"{1e9 * link.beta:.4f}",
                "GB/s": f"{1e-9 / link.beta:.2f}" if link.beta else "",
                "off by": f"{100 * link.error:.0f} %",
            }


def _show(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    if not sys.stdout.isatty():
        print("\n".join([title, *_columns(rows)]))  # noqa: T201 (printing is what was asked for)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for row in rows:
        table.add_row(*row.values())
    Console(highlight=False).print(table)


def _columns(rows: Sequence[Mapping[str, str]]) -> Iterable[str]:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(rows[0], line, widths, strict=True)
        yield "  ".join(f"{cell:<{w}}" if name in _LEFT else f"{cell:>{w}}" for name, cell, w in cells).rstrip()
