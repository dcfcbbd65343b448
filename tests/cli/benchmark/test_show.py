import io
import sys

import pytest

from colossal.cli.benchmark.measure import Result
from colossal.cli.benchmark.show import show_cases, show_links
from colossal.cluster import AxisCost, Link, LinkCost

RESULTS = [
    Result("training step", "none", 1, 8, 0.002, 4000.0, 1.5, 2**20),
    Result("training step", "data", 2, 4, 0.001, 8000.0, 3.0, 2**21),
]
COSTS = LinkCost({"tp": AxisCost(4, Link(2e-6, 1e-9, 0.25), {"p2p": Link(1.5e-6, 0.0)})})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[io.StringIO, Terminal])
def shown(request, monkeypatch) -> io.StringIO:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", request.param())
    return sys.stdout  # type: ignore[return-value]


def test_every_case_is_a_row(shown) -> None:
    show_cases(RESULTS, "the title")
    text = shown.getvalue()
    for word in ("the title", "ms/step", "training step", "data", "2.00", "8000.0", "3.000", "1.00"):
        assert word in text
    assert ("│" in text) == shown.isatty()


def test_every_operation_is_a_row_and_a_link_without_beta_has_no_bandwidth(shown) -> None:
    show_links(COSTS, "the title")
    text = shown.getvalue()
    for word in ("the title", "alpha, us", "beta, ns/B", "p2p", "all together", "1.5", "1.0000", "1.00", "25 %"):
        assert word in text
    (row,) = [line for line in text.splitlines() if "p2p" in line]
    assert row.replace("│", " ").split() == ["tp", "4", "p2p", "1.5", "0.0000", "0", "%"]


def test_plain_columns_are_aligned(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    show_cases(RESULTS, "the title")
    lines = sys.stdout.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len({len(line) for line in lines[1:]}) == 1
    assert lines[1].index("ms/step") + len("ms/step") == lines[2].index("2.00") + len("2.00")
