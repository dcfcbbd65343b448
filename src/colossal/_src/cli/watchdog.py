"""What the watchdog of an accelerator's collectives logs before it ends its process by SIGABRT.

The ranks of a GPU wait in its streams, not in Python: a missing peer raises nothing. A thread of torch looks after
the collectives (ProcessGroupNCCL, and those of other devices that follow it), and aborts the process when one has taken
longer than the timeout or its connection broke. Only what it writes before distinguishes that from a crash.
"""

import re
from collections.abc import Iterable

ADVICE = (
    "Look for the first error among the other ranks, and for one that hangs, has ended, or calls other collectives. "
    "What each rank did last is in the dumps that torch has named above; torchfrtrace reads them. Where a step may "
    "take longer, pass timeout_seconds to launch, or set COLOSSAL_TIMEOUT_SECONDS."
)
"""What to do when a watchdog has ended a rank."""

HINT = (
    "If a rank above ended with exit code -6 (SIGABRT) after messages of its watchdog, it has lost a peer, or waited "
    f"for one longer than the timeout. {ADVICE}"
)
"""The same where the output of the ranks was not read."""

_LINE = re.compile(r"(?:\[rank(?P<rank>\d+)\]:)?\[[EFW]\d+ .*ProcessGroup\w*\.cpp:\d+\] (?P<message>.*)")
_ENDING = re.compile(
    r"Watchdog caught collective operation timeout|[Ww]atchdog thread terminated|detected by watchdog|"
    r"Timeout at \w+ work|taking the entire process down|[Hh]eartbeat monitor|Received a dump signal"
)
_OF_THE_DEVICE = re.compile(r"CUDA error|HIP error|device-side assert|illegal memory access|ECC error")


def watchdog_message(line: str) -> tuple[int | None, str] | None:
    """Read a line of standard error."""
    match = _LINE.match(line)
    if match is None or not _ENDING.search(match["message"]):
        return None
    return None if match["rank"] is None else int(match["rank"]), match["message"]


def is_lost_peer(messages: Iterable[str]) -> bool:
    """Whether a peer was lost or late; the watchdog also ends ranks whose own device has an error."""
    found = list(messages)
    return bool(found) and not any(map(_OF_THE_DEVICE.search, found))
