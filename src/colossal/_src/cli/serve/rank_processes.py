"""The ranks of a server behind the first one: processes of this machine that run the same command."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import click

from colossal._src.cli.ranks import end_with_parent

_VARIABLE = "COLOSSAL_SERVE_RANK"
_POLL_SECONDS = 0.05
_END_SECONDS = 10.0


class RankProcesses:
    """Starts the other ranks, looks after them, and ends them.

    One that ends by itself is lost: what waits for it in a collective need not hear of that soon, or at all.
    """

    def __init__(self, size: int, words: Sequence[str]) -> None:
        from torch import distributed as dist

        # Its port is free, and stays so: no rank opens another store.
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        command = [sys.executable, "-m", "colossal.cli", "serve", *words]
        self._processes = {
            rank: subprocess.Popen(  # noqa: S603 (this command once more)
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), _VARIABLE: "1"},
                start_new_session=True,  # an interrupt of the terminal is for the server, which finishes what runs
            )
            for rank in range(1, size)
        }
        os.environ.update(shared | {"RANK": "0", "LOCAL_RANK": "0"})
        self._on_lost: Callable[[str], None] = _give_up
        self._is_ending = False
        self._watch = threading.Thread(target=self._run, name="colossal-ranks", daemon=True)
        self._watch.start()

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call something when a rank is lost, from another thread, instead of ending this process."""
        self._on_lost = on_lost

    def end(self, *, at_once: bool) -> None:
        """Wait until the ranks have ended, or kill them."""
        self._is_ending = True
        self._watch.join()
        deadline = time.monotonic() + (0 if at_once else _END_SECONDS)
        for process in self._processes.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()

    def _run(self) -> None:
        while not self._is_ending:
            for rank, process in self._processes.items():
                if process.poll() is not None and not self._is_ending:
                    self._on_lost(
                        f"All ranks that shard the model have to run. Found that rank {rank}, process {process.pid}, "
                        f"has ended with {process.returncode}. Look for its error, and start the server again."
                    )
                    return
            time.sleep(_POLL_SECONDS)


def _give_up(reason: str) -> None:
    """Before there are clients: end this process, which waits for the rank."""
    click.echo(f"Error: {reason}", err=True)
    os._exit(1)


def obey_the_first() -> None:
    """In a rank behind the first: end with that one, and leave signals to it."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    if _VARIABLE in os.environ:  # and not started by another launcher
        end_with_parent()
