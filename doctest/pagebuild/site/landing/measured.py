"""The measured result of the landing page: what a tutorial printed in its last recorded run, and where it ran."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagebuild.runs import DEVICES, machine_name
from pagebuild.site.badges import PageResults
from pagebuild.site.edition import BrokenInputError
from pagebuild.site.landing.texts import labels_of
from pagetest.finding import Finding
from pagetest.model.tree import LANGUAGES
from pagetest.results.result import PASS

PAGE = "features/cpu_collectives"
"""The tutorial that compares the backend `shm` with gloo in turns, in the same processes."""

_MICROSECONDS, _MILLISECONDS = 1e-3, 1.0
# What a row is read from: the time with gloo, then that with shm.
_ROWS = {
    "all_reduce": (re.compile(r"^16 MB +all_reduce +(\d+) +(\d+)", re.MULTILINE), _MICROSECONDS),
    "step": (re.compile(r"a step takes ([\d.]+) ms with gloo, ([\d.]+) ms with shm"), _MILLISECONDS),
}


def measured_result(results: PageResults) -> dict[str, Any] | None:
    """The times in milliseconds with the facts of the run; None where no run on a CPU is recorded."""
    record = results.newest.get((PAGE, LANGUAGES[0], DEVICES[0]))
    if record is None or record["status"] != PASS:
        return None
    printed = "\n".join(block["printed"] for block in record["blocks"])
    return {
        "page": PAGE,
        "rows": [_row(key, printed) for key in _ROWS],
        "machine": machine_name(record),
        "torch": record["versions"]["torch"],
        "world": record["world"],
        "date": record["date"],
        "commit": record["commit"],
    }


def _row(key: str, printed: str) -> Mapping[str, Any]:
    pattern, unit = _ROWS[key]
    match = pattern.search(printed)
    if match is None:
        message = f"the recorded run of {PAGE} printed nothing like `{pattern.pattern}`: make both agree"
        raise BrokenInputError(Finding(Path(__file__), 1, message))
    peer, ours = (float(number) * unit for number in match.groups())
    return {"key": key, "label": labels_of("measured", key), "peer": peer, "ours": ours}
