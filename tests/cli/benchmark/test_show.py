import io
import sys
from collections.abc import Callable

import pytest

from colossal._src.cli.benchmark.measure import Result
from colossal._src.cli.benchmark.show import show_cases, show_links
from colossal.cluster import AxisCost, Link, LinkCost

RESULTS = [
    Result("training step", "none", 1, 8, 0.002, 4000.0, 1.5, 2**20, 0),
    Result("training step", "data", 2, 4, 0.001, 8000.0, 3.0, 2**21, 2**20),
]
COSTS = LinkCost({"tp": AxisCost(4, Link(2e-6, 1e-9, 0.25), {"p2p": Link(1.5e-6, 0.0)})})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STREAMS = pytest.mark.parametrize("stream", [io.StringIO, Terminal])


def shown(show: Callable[..., None], what: object, stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stream())
    show(what, "the title")
    return sys.stdout.getvalue()  # type: ignore[attr-defined]


@STREAMS
def test_every_case_is_a_row(stream, monkeypatch) -> None:
    text = shown(show_cases, RESULTS, stream, monkeypatch)
    for word in ("the title", "ms/step", "training step", "data", "2.00", "8000.0", "3.000", "1.00"):
        assert word in text
    assert ("│" in text) == (stream is Terminal)


@STREAMS
def test_every_operation_is_a_row_and_a_link_without_beta_has_no_bandwidth(stream, monkeypatch) -> None:
    text = shown(show_links, COSTS, stream, monkeypatch)
    for word in ("the title", "alpha, us", "beta, ns/B", "p2p", "all together", "1.5", "1.0000", "1.00", "25 %"):
        assert word in text
    (row,) = [line for line in text.splitlines() if "p2p" in line]
    assert row.replace("│", " ").split() == ["tp", "4", "p2p", "1.5", "0.0000", "0", "%"]


def test_plain_columns_are_aligned(monkeypatch) -> None:
    lines = shown(show_cases, RESULTS, io.StringIO, monkeypatch).splitlines()
    assert len({len(line.removesuffix("  fastest")) for line in lines[1:]}) == 1
    assert lines[1].index("ms/step") + len("ms/step") == lines[2].index("2.00") + len("2.00")
