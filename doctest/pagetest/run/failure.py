"""Failures: whether a run verifies its page, and if not, which line says why."""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pagetest.model.instrument import Mark, executed_lines, statement_lines, unreached_marks
from pagetest.model.page import Page
from pagetest.run.command import CommandOutcome
from pagetest.run.device import Device
from pagetest.run.events import RunEvents, StackSample

MIN_EXECUTED_FRACTION = 0.9

_MAX_NAMED_LINES = 5


@dataclass(frozen=True)
class Failure:
    """Why a page did not pass."""

    line: int
    message: str  # what happened, and what to do where that is not plain
    rank: int | None = None  # the rank that failed first; None where no single rank did
    others: tuple[str, ...] = ()


def find_failure(
    page: Page, marks: Sequence[Mark], outcome: CommandOutcome, events: RunEvents, device: Device
) -> Failure | None:
    """Gives the first reason why the page fails, or None if the run proves it."""
    failures = chain(_run_failures(page, marks, outcome, events), _device_failures(page, events, device))
    return next(failures, None)


def _run_failures(page: Page, marks: Sequence[Mark], outcome: CommandOutcome, events: RunEvents) -> Iterator[Failure]:
    if outcome.timed_out:
        yield _hang_failure(page, outcome, events)
    if outcome.returncode or events.failure_events:
        yield _error_failure(page, outcome, events)
    for left in outcome.leftovers:
        line = events.process_starts.get(left.pid, 0)
        known = "" if line else " (the line that started it is unknown)"
        message = (
            f"a process outlived the page and was killed: {left.command} [pid {left.pid}]{known}: end it or join it"
        )
        yield Failure(line or page.command_line, message)
    if not events.has_started:
        yield Failure(page.command_line, f"the command ended well but {page.stem}.py was never run by it: correct it")
    for event in events.unfinished_events:
        yield Failure(page.command_line, "the process was gone before the page came to its end", event["rank"])
    lines, run = statement_lines(marks), executed_lines(marks, events.reached(0))
    if len(run) < MIN_EXECUTED_FRACTION * len(lines):
        yield _too_few_lines(lines, run)
    for mark in unreached_marks(marks, events.reached()):
        yield Failure(
            mark.line, f"this {mark.required} never ran on any rank, so it proves nothing: reach it, or drop it"
        )


def _device_failures(page: Page, events: RunEvents, device: Device) -> Iterator[Failure]:
    if device.requested and events.device != device.requested:
        message = f"the page was asked to run on {device.requested} and used {events.device or 'no device'}"
        yield Failure(page.command_line, f"{message}: take the device from colossal.accelerator")


def _too_few_lines(lines: list[int], run: list[int]) -> Failure:
    missed = sorted(set(lines) - set(run))
    shown = ", ".join(map(str, missed[:_MAX_NAMED_LINES])) + (", ..." if len(missed) > _MAX_NAMED_LINES else "")
    executed = f"{len(lines) - len(missed)} of {len(lines)}"
    message = (
        f"at least {MIN_EXECUTED_FRACTION:.0%} of the lines must run on rank 0; {executed} did, "
        f"these never ran: {shown}: "
    )
    return Failure(missed[0], message + "call that code, or show it in an ignored region with its reason")


def _error_failure(page: Page, outcome: CommandOutcome, events: RunEvents) -> Failure:
    failed = events.failure_events or events.events_of("failed")
    if failed:
        first, *rest = failed
        others = tuple(f"rank {event['rank']}: line {event['line']}: {_one_line(event)}" for event in rest)
        return Failure(first["line"] or page.command_line, _one_line(first), first["rank"], others)
    code = outcome.returncode
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    for sample in events.stack_samples():
        return Failure(
            sample.line or page.command_line, f"the process died of a fatal signal; the command {end}", sample.rank
        )
    return Failure(page.command_line, f"the command {end}; see the log")


def _hang_failure(page: Page, outcome: CommandOutcome, events: RunEvents) -> Failure:
    if events.failure_events:
        failure = _error_failure(page, outcome, events)
        return Failure(failure.line, f"{failure.message} (and the page then hung)", failure.rank, failure.others)
    limit = f"no end after {outcome.seconds:.0f} s, killed"
    samples = events.stack_samples()
    if not samples:
        return Failure(page.command_line, f"{limit}; no process of the page could be asked where it stood")
    others = tuple(f"rank {sample.rank}: {_describe_position(sample)}" for sample in samples[1:])
    return Failure(
        samples[0].line or page.command_line, f"{limit}: hung {_describe_position(samples[0])}", samples[0].rank, others
    )


def _describe_position(sample: StackSample) -> str:
    where = f"at line {sample.line}" if sample.line else "outside the page"
    return where + (f" in {sample.innermost}" if sample.innermost else "")


def _one_line(event: dict) -> str:
    """An exception in one line; of a message with several, the first that says something and the last."""
    lines = [line.strip() for line in event["message"].splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
