"""The command ``colossal check``."""

import json
import sys
from collections.abc import Iterator

import click

from colossal._src.cli.check import communication, compatibility, devices, kernels, machine, versions
from colossal._src.cli.check.report import Report, Row, Section, show
from colossal._src.cli.check.selftest import self_tests
from colossal._src.cli.common import SETTINGS

DEFAULT_TIMEOUT_SECONDS = 120.0
_AFTER_VERSIONS = (compatibility.SECTION, devices.SECTION, communication.SECTION, kernels.SECTION)


@click.command("check", context_settings=SETTINGS)
@click.option("-i", "--installation", is_flag=True, help="Check the installation, which is what happens in any case.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--timeout",
    "timeout_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_TIMEOUT_SECONDS,
    show_default=True,
    help="How long the self test may take, in seconds.",
)
def command(installation: bool, as_json: bool, timeout_seconds: float) -> None:  # noqa: ARG001 (documented, implied)
    """Check whether this machine can train.

    Looks at versions, at whether torch, CUDA and own code fit together, at devices, communication, kernels and limits,
    and lets two processes train a step and compare it with a single process. Ends with 0 if the machine is usable, with
    1 if there is a problem; each problem says what to do about it.

    With --json it prints an object with the keys version, usable and rows. Each row has a section and a name, a status
    (ok; note: usable, but worth knowing; problem; skipped), found for people, value for programs, and advice or null.
    New keys and rows may come; version changes if one changes its meaning or goes.
    """
    report = Report(tuple(_rows(timeout_seconds)))
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        show(report)
    sys.exit(0 if report.usable else 1)


def _rows(timeout_seconds: float) -> Iterator[Row]:
    """Look at everything; what needs torch is skipped where the packages themselves are the problem."""
    found = list(versions.SECTION.rows())
    yield from found
    yield from machine.SECTION.rows()
    broken = [row.name for row in found if row.status == "problem"]
    if broken:
        reason = f"not looked at: {', '.join(broken)} must be put right first"
        for title in (*(section.title for section in _AFTER_VERSIONS), "self test"):
            yield Row(title, "all", "skipped", reason)
        return
    for section in _AFTER_VERSIONS:
        yield from section.rows()
    yield from Section("self test", lambda: _self_test_rows(timeout_seconds)).rows()


def _self_test_rows(timeout_seconds: float) -> Iterator[Row]:
    for test in self_tests(timeout_seconds):
        yield from test.rows()
