"""Two processes train a step: the other sections can only make it likely that this works."""

import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, final

from colossal._src.cli.check.rank import STEPS
from colossal._src.cli.check.report import Row
from colossal._src.cli.ranks import Outcome, run_ranks
from colossal._src.cli.watchdog import is_lost_peer, watchdog_message

RANK = "colossal._src.cli.check.rank"
_End = dict[str, Any]

_MEET = "See whether a firewall or a proxy keeps this machine from itself; GLOO_SOCKET_IFNAME=lo uses the loopback."
_ADVICE = {
    "launch": _MEET,
    "collective": _MEET,
    "training step": "Install torch anew; if it stays, report it with the output of colossal check --json.",
    "checkpoint": "See whether the folder of temporary files, TMPDIR, can be written to and has room.",
}


@final
@dataclass(frozen=True)
class SelfTest:
    """A self test on one kind of device."""

    device: str  # ``"cpu"``, or an accelerator such as ``"cuda"``
    size: int  # number of ranks
    timeout_seconds: float  # how long the ranks may take
    module: str = RANK  # what each rank runs

    @property
    def title(self) -> str:
        """The section of its rows."""
        return f"self test, {self.size} rank{'s' if self.size > 1 else ''}, {self.device}"

    def rows(self) -> Iterator[Row]:
        """Run it, and report how each step went."""
        with tempfile.TemporaryDirectory(prefix="colossal-check-") as folder:
            environment = {"COLOSSAL_DEVICE": self.device, "COLOSSAL_TIMEOUT_SECONDS": str(self.timeout_seconds)}
            outcomes = run_ranks(
                self.module, self.size, [folder], timeout_seconds=self.timeout_seconds, environment=environment
            )
        failed = False
        for name in STEPS:
            row = self._skipped(name) if failed else self._row(name, outcomes)
            failed = failed or row.status == "problem"
            yield row
        stopped = [one for one in outcomes if one.code != 0]
        if stopped and not failed:
            yield Row(self.title, "end", "problem", self._first(stopped), advice=_ADVICE["training step"])

    def _row(self, name: str, outcomes: Sequence[Outcome]) -> Row:
        ends = [_end(name, outcome) for outcome in outcomes]
        seconds = [end["seconds"] for end in ends if end and "seconds" in end]
        if len(seconds) == len(outcomes):
            return Row(self.title, name, "ok", f"{max(seconds):.2f} s", round(max(seconds), 4))
        return Row(self.title, name, "problem", self._cause(outcomes, ends), advice=_ADVICE[name])

    def _cause(self, outcomes: Sequence[Outcome], ends: Sequence[_End | None]) -> str:
        """The first thing that went wrong: a rank that dies makes the others fail a little later."""
        killed = [one for one in outcomes if one.code is not None and one.code < 0]
        errors = [(end["at"], one.rank, end["error"]) for one, end in zip(outcomes, ends, strict=True) if _failed(end)]
        if errors and not killed:
            _, rank, error = min(errors)
            return f"rank {rank}: {error}"
        return self._first(killed or [one for one, end in zip(outcomes, ends, strict=True) if end is None])

    def _first(self, stopped: Sequence[Outcome]) -> str:
        """How a rank ended, and not how another one waited for it until it was ended too."""
        first = min(stopped, key=lambda one: (one.code is None, one.rank))
        return f"rank {first.rank} {_how(first, self.timeout_seconds)}"

    def _skipped(self, name: str) -> Row:
        return Row(self.title, name, "skipped", "not reached")


def self_tests(timeout_seconds: float) -> Iterator[SelfTest]:
    """Choose the tests that suit the machine: two ranks on the CPU, and up to two on its accelerator."""
    from colossal.accelerator import get_accelerator

    yield SelfTest("cpu", 2, timeout_seconds)
    accelerator = get_accelerator()
    if not accelerator.is_cpu:
        yield SelfTest(accelerator.name, min(2, accelerator.device_count()), timeout_seconds)


def _failed(end: _End | None) -> TypeGuard[_End]:
    return end is not None and "error" in end


def _end(name: str, outcome: Outcome) -> _End | None:
    """What a rank reported at the end of a step; None if it never came there."""
    ends = [report for report in outcome.reports if report["step"] == name and report["state"] != "begun"]
    return ends[0] if ends else None


def _how(outcome: Outcome, timeout_seconds: float) -> str:
    """How a rank came to its end."""
    last = outcome.printed.splitlines()[-1].strip() if outcome.printed else "it printed nothing"
    if outcome.code is None:
        frames = [line.strip() for line in outcome.printed.splitlines() if line.strip().startswith("File ")]
        return f"did not come to an end in {timeout_seconds:g} s; it was at {frames[0] if frames else last}"
    if outcome.code < 0:
        messages = [message[1] for message in map(watchdog_message, outcome.printed.splitlines()) if message]
        if outcome.code == -signal.SIGABRT and is_lost_peer(messages):
            return f"lost a peer, or waited for one too long, and its watchdog ended it: {messages[0]}"
        return f"was killed by signal {-outcome.code}"
    return f"ended with code {outcome.code}: {last}"
