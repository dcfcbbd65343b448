"""Processes of a world, each on a device of its own, that compute when they are told to.

A rank runs a generator function, named as ``module:function``: each line of its standard input asks for the next value.
So contenders of one race are worlds that sleep while it is another's turn, and what runs out of memory ends alone.
"""

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
_PATHS = (ROOT / "src", ROOT / "tests" / "gpu", ROOT / "tests" / "helpers")
_EXTRA = {"pretend": [str(ROOT / "tests" / "device")]}
"""Where the packages of a device lie that torch does not have."""
_LAST_LINES = 4


class WorldError(RuntimeError):
    """A rank failed, ended or was late.

    Attributes:
        kind: The name of the error of a rank; empty if it raised none.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class World:
    """The ranks of a world, as a context manager that ends them.

    Args:
        target: What each rank runs, ``module:function``.
        arguments: Its keyword arguments; what JSON can hold.
        folder: Where the ranks write what they print.
        size: Number of ranks.
        device: ``"cuda"``, or ``"cpu"`` or ``"pretend"`` to try the program out.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any], folder: Path, size: int, device: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        paths = os.pathsep.join([*map(str, _PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
        shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {
            "PYTHONPATH": os.pathsep.join([paths, *_EXTRA.get(device, ())]),
            "COLOSSAL_DEVICE": device,
            "OMP_NUM_THREADS": 4 if device == "cuda" else 1,
        }
        self.target = target
        self._logs = [folder / f"{target.replace(':', '-')}-{port}-{rank}.log" for rank in range(size)]
        self._ranks: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self._logs):
            own = {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            with log.open("wb") as errors:
                process = subprocess.Popen(
                    [sys.executable, __file__, target, json.dumps(dict(arguments))],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=os.environ | own,
                    start_new_session=True,
                )
            self._ranks.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe
                pipe.close()

    def ask(self, seconds: float) -> list[Any]:
        """Ask every rank for its next value.

        Args:
            seconds: How long they may take.

        Raises:
            WorldError: A rank failed, ended, or is late.
        """
        for process in self._ranks:
            assert process.stdin
            with suppress(BrokenPipeError):  # it ended: reading tells
                process.stdin.write(b"\n")
        waiting = {process.stdout: rank for rank, process in enumerate(self._ranks) if process.stdout}
        found: dict[int, Any] = {}
        until = time.monotonic() + seconds
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise WorldError(f"{self.target}: ranks {sorted(waiting.values())} are not done after {seconds:.0f} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                found[rank] = self._read(rank, pipe.readline())
        return [found[rank] for rank in range(len(self._ranks))]

    def _read(self, rank: int, line: bytes) -> Any:
        if not line:
            said = self._logs[rank].read_text(errors="replace").splitlines()[-_LAST_LINES:]
            raise WorldError(f"{self.target}: rank {rank} ended: {' / '.join(said)}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorldError(f"{self.target}: rank {rank}: {answer['error']}", answer["kind"])
        return answer["value"]


def once(target: str, arguments: Mapping[str, Any], folder: Path, size: int, device: str, seconds: float) -> list[Any]:
    """Ask a world for one value of every rank, and end it."""
    with World(target, arguments, folder, size, device) as world:
        return world.ask(seconds)


def main() -> None:
    """Be a rank."""
    target, arguments = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints
    module, _, function = target.partition(":")
    values: Iterator[Any] | None = None
    for _ in sys.stdin:
        try:
            if values is None:
                values = getattr(importlib.import_module(module), function)(**json.loads(arguments))
            assert values is not None
            answer = {"value": next(values)}
        except Exception as error:  # noqa: BLE001 (whatever it is, the table says it)
            traceback.print_exc()
            kind = type(error).__name__
            answer = {"error": f"{kind}: {error}", "kind": kind}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # process groups of devices that failed wait for each other


if __name__ == "__main__":
    main()
