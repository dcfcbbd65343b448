"""The verdict: whether a run proves its page, and if not, which line says why."""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pagetest.model.marks import Mark, lines_of, lines_run, unproved
from pagetest.model.page import Page
from pagetest.run.device import Device
from pagetest.run.evidence import Evidence, Stand
from pagetest.run.outcome import Outcome

PROVED_SHARE = 0.9

_NAMED_LINES = 5


@dataclass(frozen=True)
class Failure:
    """Why a page did not pass.

    Attributes:
        line: The Markdown line.
        rank: The rank that failed first; None where the page as a whole failed.
        message: What happened, and what to do where that is not plain.
        others: What the other ranks did.
    """

    line: int
    message: str
    rank: int | None = None
    others: tuple[str, ...] = ()


def judge(page: Page, marks: Sequence[Mark], outcome: Outcome, evidence: Evidence, device: Device) -> Failure | None:
    """Gives the first reason why the page fails, or None if the run proves it.

    Args:
        page: The page that ran.
        marks: The marks of its script.
        outcome: How its processes ended.
        evidence: What its processes reported.
        device: Where it should have run.
    """
    failures = chain(_failures(page, marks, outcome, evidence), _strays(page, evidence, device))
    return next(failures, None)


def _failures(page: Page, marks: Sequence[Mark], outcome: Outcome, evidence: Evidence) -> Iterator[Failure]:
    if outcome.timed_out:
        yield _hang(page, outcome, evidence)
    if outcome.returncode or evidence.failures:
        yield _error(page, outcome, evidence)
    for left in outcome.leftovers:
        line = evidence.births.get(left.pid, 0)
        known = "" if line else " (the line that started it is unknown)"
        message = (
            f"a process outlived the page and was killed: {left.command} [pid {left.pid}]{known}: end it or join it"
        )
        yield Failure(line or page.command_line, message)
    if not evidence.has_started:
        yield Failure(page.command_line, f"the command ended well but {page.stem}.py was never run by it: correct it")
    for event in evidence.unended:
        yield Failure(page.command_line, "the process was gone before the page came to its end", event["rank"])
    lines, run = lines_of(marks), lines_run(marks, evidence.reached(0))
    if len(run) < PROVED_SHARE * len(lines):
        yield _vacuity(lines, run)
    for mark in unproved(marks, evidence.reached()):
        yield Failure(mark.line, f"this {mark.must} never ran on any rank, so it proves nothing: reach it, or drop it")


def _strays(page: Page, evidence: Evidence, device: Device) -> Iterator[Failure]:
    if device.asked and evidence.device != device.asked:
        message = f"the page was asked to run on {device.asked} and used {evidence.device or 'no device'}"
        yield Failure(page.command_line, f"{message}: take the device from colossal.accelerator")


def _vacuity(lines: list[int], run: list[int]) -> Failure:
    missed = sorted(set(lines) - set(run))
    shown = ", ".join(map(str, missed[:_NAMED_LINES])) + (", ..." if len(missed) > _NAMED_LINES else "")
    share = f"{len(lines) - len(missed)} of {len(lines)}"
    message = f"at least {PROVED_SHARE:.0%} of the lines must run on rank 0; {share} did, these never ran: {shown}: "
    return Failure(missed[0], message + "call that code, or show it in an ignored region with its reason")


def _error(page: Page, outcome: Outcome, evidence: Evidence) -> Failure:
    failed = evidence.failures or evidence.of("failed")
    if failed:
        first, *rest = failed
        others = tuple(f"rank {event['rank']}: line {event['line']}: {_headline(event)}" for event in rest)
        return Failure(first["line"] or page.command_line, _headline(first), first["rank"], others)
    code = outcome.returncode
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    for stand in evidence.stands():
        return Failure(
            stand.line or page.command_line, f"the process died of a fatal signal; the command {end}", stand.rank
        )
    return Failure(page.command_line, f"the command {end}; the log tells more")


def _hang(page: Page, outcome: Outcome, evidence: Evidence) -> Failure:
    if evidence.failures:
        failure = _error(page, outcome, evidence)
        return Failure(failure.line, f"{failure.message} (and the page then hung)", failure.rank, failure.others)
    limit = f"no end after {outcome.seconds:.0f} s, killed"
    stands = evidence.stands()
    if not stands:
        return Failure(page.command_line, f"{limit}; no process of the page could be asked where it stood")
    others = tuple(f"rank {stand.rank}: {_place(stand)}" for stand in stands[1:])
    return Failure(stands[0].line or page.command_line, f"{limit}: hung {_place(stands[0])}", stands[0].rank, others)


def _place(stand: Stand) -> str:
    where = f"at line {stand.line}" if stand.line else "outside the page"
    return where + (f" in {stand.inside}" if stand.inside else "")


def _headline(event: dict) -> str:
    """An exception in one line; of a message with several, the first that says something and the last."""
    lines = [line.strip() for line in event["message"].splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
