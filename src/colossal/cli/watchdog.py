"""What the watchdog of an accelerator's collectives says before it ends its process by SIGABRT.

The ranks of a GPU wait in its streams, not in Python: who does not come raises nothing. A thread of torch looks after
the collectives (ProcessGroupNCCL, and those of other devices that follow it), and aborts the process when one has taken
longer than the timeout or its connection broke. What it writes before is all there is to tell that from a crash.
"""

import re
from collections.abc import Iterable

ADVICE = (
    "Look for the first error among the other ranks, and for one that hangs, has ended, or calls other collectives. "
    "What each rank did last is in the dumps that torch has named above; torchfrtrace reads them. Where a step may "
    "take longer, pass timeout_seconds to launch, or set COLOSSAL_TIMEOUT_SECONDS."
)
"""What to do when a rank was ended so."""

HINT = (
    "If a rank above ended with exit code -6 (SIGABRT) after words of its watchdog, it has lost a peer, or waited for "
    f"one longer than the timeout. {ADVICE}"
)
"""The same where nobody has read what the ranks wrote."""

_LINE = re.compile(r"(?:\[rank(?P<rank>\d+)\]:)?\[[EFW]\d+ .*ProcessGroup\w*\.cpp:\d+\] (?P<words>.*)")
_ENDING = re.compile(
    r"Watchdog caught collective operation timeout|[Ww]atchdog thread terminated|detected by watchdog|"
    r"Timeout at \w+ work|taking the entire process down|[Hh]eartbeat monitor|Received a dump signal"
)
_OF_THE_DEVICE = re.compile(r"CUDA error|HIP error|device-side assert|illegal memory access|ECC error")


def watchdog_words(line: str) -> tuple[int | None, str] | None:
    """Read a line of standard error."""
    match = _LINE.match(line)
    if match is None or not _ENDING.search(match["words"]):
        return None
    return None if match["rank"] is None else int(match["rank"]), match["words"]


def is_lost_peer(words: Iterable[str]) -> bool:
    """Tell a peer that was lost or late from an error of this rank's own device, which the watchdog finds as well."""
    found = list(words)
    return bool(found) and not any(map(_OF_THE_DEVICE.search, found))
