"""A world of real processes for one call.

The processes are forked from a server that has imported torch already, so that two ranks start in a few hundredths of
a second where torchrun takes some three seconds. Each call gets new ones: nothing leaks from one test into the next.
"""

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch
from torch import distributed as dist

from colossal.cluster.rendezvous import World, form_world

PRELOADED = ["torch", "torch._dynamo", "torch.distributed.device_mesh", "colossal.booster", "colossal.testing"]
"""What the fork server imports; building an optimizer imports torch._dynamo. A test suite may add to it."""

GRACE_SECONDS = 5.0


class WorldError(AssertionError):
    """A rank of a test world raised, died or did not come to an end."""


@final
@dataclass(frozen=True)
class _Order:
    """What one process is asked to do."""

    rank: int
    size: int
    form: bool
    folder: str
    file: str
    module: str
    qualname: str
    environment: Mapping[str, str]
    arguments: bytes
    timeout_seconds: float

    @property
    def stack_file(self) -> Path:
        return Path(self.folder, f"stack-{self.rank}")


@dataclass
class _Rank:
    """One process, and what came back from it."""

    process: ForkServerProcess
    order: _Order
    pipe: "connection.Connection[Any, Any]"
    result: Any = None
    error: str | None = None
    done: bool = False

    def receive(self) -> None:
        self.done = True
        try:
            succeeded, content = pickle.loads(self.pipe.recv_bytes())  # noqa: S301 (from our own child)
        except EOFError:
            self.process.join()
            self.error = f"The process died with exit code {self.process.exitcode}.\n"
            return
        if succeeded:
            self.result = content
        else:
            self.error = content

    def tell_where(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.2)
        stack = self.order.stack_file
        self.error = "It did not come to an end. It was at:\n" + (stack.read_text() if stack.exists() else "?\n")


def run_processes(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    form: bool = True,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Run a function on every rank of a world of processes on this host's CPU, joined as by `launch`, one thread each.

    Args:
        function: A function at the top level of a file, called on every rank.
        size: Number of ranks.
        *args: Passed to the function; pickled.
        form: Form the world first; otherwise the function does it.
        environment: Variables to set in the processes; ``{rank}`` in a value stands for the rank.
        timeout_seconds: How long the ranks may take, and how long a collective waits for a peer.
        **kwargs: Passed to the function; pickled.

    Returns:
        What it returned, by rank; pickled.

    Raises:
        WorldError: The function raised on a rank, a process died, or the ranks took too long.

    Communication: the processes meet at a file and open connections to each other; nothing if `form` is False.

    Example:
        >>> from torch import distributed as dist
        >>> from colossal.testing import run_processes
        >>> run_processes(dist.get_rank, 2)
        [0, 1]
    """
    arguments = pickle.dumps((args, kwargs))
    file, module = inspect.getfile(function), function.__module__
    with tempfile.TemporaryDirectory(prefix="colossal-world-") as folder:
        orders = [
            _Order(
                rank,
                size,
                form,
                folder,
                file,
                module,
                function.__qualname__,
                {name: value.format(rank=rank) for name, value in (environment or {}).items()},
                arguments,
                timeout_seconds,
            )
            for rank in range(size)
        ]
        ranks = [_start(order) for order in orders]
        try:
            failed = _collect(ranks, timeout_seconds)
        finally:
            _end(ranks)
    if failed:
        raise _failure(failed, size)
    return [rank.result for rank in ranks]


def _start(order: _Order) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(order, theirs), daemon=True)
    with _one_thread():
        process.start()
    theirs.close()
    return _Rank(process, order, ours)


def _collect(ranks: list[_Rank], timeout_seconds: float) -> list[_Rank]:
    """Wait for all ranks; after a first failure, only a little longer."""
    deadline = time.monotonic() + timeout_seconds
    failed: list[_Rank] = []
    while waiting := {rank.pipe: rank for rank in ranks if not rank.done}:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = next(r for p, r in waiting.items() if p is pipe)
            rank.receive()
            if rank.error is not None:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in ranks:
        if not rank.done:
            rank.tell_where()
            failed.append(rank)
    return failed


def _failure(failed: list[_Rank], size: int) -> WorldError:
    reports = "\n".join(f"Rank {rank.order.rank}: {rank.error}" for rank in failed)
    return WorldError(f"{len(failed)} of {size} processes failed, the first one first.\n{reports}")


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if not rank.done:
            rank.process.kill()
        rank.process.join()
        rank.process.close()
        rank.pipe.close()


@contextmanager
def _one_thread() -> Any:
    """Let the fork server, which starts with the first process, read OMP_NUM_THREADS=1."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _serve(order: _Order, pipe: "connection.Connection[Any, Any]") -> None:
    os.environ.update(order.environment)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with order.stack_file.open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        try:
            content = (True, _call(order))
            reply = pickle.dumps(content)
        except BaseException:  # noqa: BLE001 (reported by the caller's process)
            reply = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(reply)
        faulthandler.unregister(signal.SIGUSR1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(order: _Order) -> Any:
    function = reduce(getattr, order.qualname.split("."), _load(order.file, order.module))
    args, kwargs = pickle.loads(order.arguments)  # noqa: S301 (from our own parent)
    if order.form:
        store = dist.FileStore(str(Path(order.folder, "store")), order.size)
        form_world(World(store, order.rank, order.size, order.timeout_seconds), os.environ.get("COLOSSAL_BACKEND"))
        dist.barrier()  # a function that does nothing must not end before the others are connected
    return function(*args, **kwargs)


def _load(file: str, module: str) -> Any:
    """Import the function's module from its file: test files need not be importable by name."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        for parent in accumulate(module.split(".")[:-1], "{}.{}".format):
            sys.modules.setdefault(parent, ModuleType(parent))
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]
