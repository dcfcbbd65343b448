"""Processes that a command starts for itself: the ranks of one job on this machine, with a deadline.

A rank is a module run with ``python -m``, under the variables that torchrun would set. It writes its reports, one
JSON object a line, to the file that `REPORT_VARIABLE` names; whatever it or its libraries print is kept for the case
that it fails.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

REPORT_VARIABLE = "COLOSSAL_RANK_REPORT"
GRACE_SECONDS = 3.0
"""How long the others may go on after the first rank has failed."""

_POLL_SECONDS = 0.02
_TAIL_LINES = 30


@final
@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    rank: int  # its number
    reports: list[dict[str, Any]]  # the objects that it reported, in order
    code: int | None  # its exit status; None if it had to be ended
    printed: str  # the last lines that it printed, with its stack if it had to be ended


def run_ranks(
    module: str,
    size: int,
    words: Sequence[str] = (),
    *,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run a module on every rank of a job, and end the ranks that are late."""
    from torch import distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **(environment or {}),
    }
    with tempfile.TemporaryDirectory(prefix="colossal-ranks-") as folder:
        ranks = [
            _RankProcess(rank, [sys.executable, "-m", module, *words], shared, Path(folder)) for rank in range(size)
        ]
        try:
            late = _wait(ranks, timeout_seconds)
        finally:
            for rank in ranks:
                rank.end()
        return [rank.outcome(late=rank in late) for rank in ranks]


class _RankProcess:
    """One process, and the files that it writes."""

    def __init__(self, rank: int, command: list[str], environment: Mapping[str, str], folder: Path) -> None:
        self.rank = rank
        self.report, self.log = folder / f"report-{rank}", folder / f"log-{rank}"
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), REPORT_VARIABLE: str(self.report)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603 (this interpreter, a module of ours)
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, **own},
                start_new_session=True,
            )

    def ask_where(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        """End the process and everything that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()

    def outcome(self, *, late: bool) -> Outcome:
        reported = self.report.read_text(encoding="utf-8") if self.report.exists() else ""
        printed = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        complete_lines = reported[: reported.rfind("\n") + 1].splitlines()
        code = None if late else self.process.returncode
        return Outcome(self.rank, [json.loads(line) for line in complete_lines], code, "\n".join(printed))


def _wait(ranks: Sequence[_RankProcess], timeout_seconds: float) -> list[_RankProcess]:
    """Wait for all; after a first failure, only a little longer. Return those that did not come to an end."""
    deadline = time.monotonic() + timeout_seconds
    failed = False
    while (running := [rank for rank in ranks if rank.process.poll() is None]) and time.monotonic() < deadline:
        if not failed and any(rank.process.returncode for rank in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    for rank in running:
        rank.ask_where()
    if running:
        time.sleep(10 * _POLL_SECONDS)
    return running


def follow_parent() -> None:
    """In a rank: end when the process that started it is gone, and print the stack when it asks.

    Does nothing in a process that another launcher has started.
    """
    if REPORT_VARIABLE not in os.environ:
        return
    faulthandler.register(signal.SIGUSR1)
    end_with_parent()


def end_with_parent() -> None:
    """In a rank whose standard input is a pipe of the process that started it: end when that one is gone."""
    threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def say(**values: Any) -> None:
    """In a rank: report an object to the process that started it."""
    with Path(os.environ[REPORT_VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
