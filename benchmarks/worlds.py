"""Worlds of ranks that take turns: processes of their own, which sleep while it is another's turn."""

import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

START_SECONDS, TURN_SECONDS = 900, 300


class World:
    """The ranks of one command, each of which reads requests from its input and answers in lines of JSON."""

    def __init__(self, name: str, command: Sequence[str], ranks: int, folder: str, env: Mapping[str, str]) -> None:
        self.name = name
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        self._errors = [Path(folder, f"{name}-{rank}") for rank in range(ranks)]
        self._ranks: list[subprocess.Popen[bytes]] = []
        for rank, path in enumerate(self._errors):
            own = {key: str(value) for key, value in {**shared, **env, "RANK": rank, "LOCAL_RANK": rank}.items()}
            pipe, variables = subprocess.PIPE, os.environ | own
            with path.open("wb") as errors:
                self._ranks.append(subprocess.Popen(command, 0, stdin=pipe, stdout=pipe, stderr=errors, env=variables))

    def ask(self, request: str) -> list[dict[str, Any]]:
        """Let all ranks do something, and return what they say."""
        for process in self._ranks:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it ended: reading tells
                process.stdin.write(request.encode())
        return self.answers(TURN_SECONDS)

    def answers(self, seconds: float = START_SECONDS) -> list[dict[str, Any]]:
        """Wait for a line of every rank.

        Raises:
            RuntimeError: A rank ended, or did not answer in time.
        """
        until, found = time.monotonic() + seconds, []
        for rank, process in enumerate(self._ranks):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(until - time.monotonic(), 0))
            line = process.stdout.readline() if ready else b""
            if not line:
                last_words = [path.read_text(errors="replace")[-3000:] for path in self._errors]
                what = f"Rank {rank} of {self.name} {'ended' if ready else 'is late'}. All said:"
                raise RuntimeError("\n".join([what, *last_words]))
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        """Let the ranks end, or make them."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        until = time.monotonic() + 15
        for process in self._ranks:
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
