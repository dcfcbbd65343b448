"""A world of real processes for one call.

The processes are forked from a server that has imported torch already, so that two ranks start in a few hundredths of
a second where torchrun takes some three seconds. Each call gets new ones: nothing leaks from one test into the next.

A test suite saves most of the rest with `reuse_processes`. See [Note: reused processes].
"""

import inspect
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from typing import Any, final

from colossal._src._lost_peer import LOST_PEER
from colossal._src.testing.limits import scaled
from colossal._src.testing.task_server import Task, serve
from colossal._src.testing.tensor_pickle import dumps

PRELOADED = ["torch", "torch._dynamo", "torch.distributed.device_mesh", "colossal.booster", "colossal.testing"]
"""What the fork server imports; building an optimizer imports torch._dynamo. A test suite may add to it."""

GRACE_SECONDS = 5.0
"""How long the other ranks may still take once one has failed: they often fail with it, and say why."""

_WAITS = re.compile(r"distributed_c10d\.py|_shm/engine\.py")
"""What is in the stack of a rank that waits for others."""

# [Note: reused processes]
# Inside `reuse_processes`, a process serves one call after the other, each in a new process group over a new store:
# rank 0 is always the first process, so that there are no more processes than the largest call has ranks. After each
# call a process restores what it was like before the first (`process_state.py`), drops the module that the function
# came from, and reports what it could not restore. Processes that report anything are replaced; after a failure, a
# timeout or a death, all processes of that call are.


class WorldError(AssertionError):
    """A rank of a test raised, died or did not end in time."""


@final
class _Process:
    """A process that carries out orders, one after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        their_orders, self.orders = context.Pipe(duplex=False)
        self.replies, their_replies = context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(target=serve, args=(their_orders, their_replies), daemon=True)
        with _one_thread():
            self.process.start()
        # with these ends open here, the death of the process would not close the pipes
        their_orders.close()
        their_replies.close()
        self.has_ended = False

    def end(self, *, at_once: bool) -> None:
        """Wait until the process has ended by itself, or kill it."""
        self.orders.close()
        if at_once:
            self.process.kill()
        self.process.join()
        self.process.close()
        self.replies.close()
        self.has_ended = True


@final
class _Pool:
    """The processes that are kept between calls."""

    def __init__(self) -> None:
        self.processes: list[_Process] = []

    def take(self, size: int) -> list[_Process]:
        """Return that many processes that are alive, the same ones each time."""
        for process in self.processes:
            # One that waits for an order has nothing to say: what can be read is the end of its pipe. That is there at
            # once, and the word of the fork server that a process has died a moment later.
            if not process.has_ended and (process.replies.poll() or not process.process.is_alive()):
                process.end(at_once=True)
        self.processes = [process for process in self.processes if not process.has_ended]
        self.processes += [_Process() for _ in range(size - len(self.processes))]
        return self.processes[:size]


_pools: list[_Pool] = []
"""One for each `reuse_processes` that has been entered, the innermost last."""


@contextmanager
def reuse_processes() -> Iterator[None]:
    """Let `run_processes` keep its processes from one call to the next, each time with a new process group.

    Between calls each process leaves its process groups, and restores the environment, the working folder, the default
    dtype, generators of random numbers and other settings. It is replaced if the call failed, or if something remains
    that cannot be restored: a thread, a child process, a replaced function. What else a function changes in a library,
    such as a warning that is given only once, the next one finds: pass ``fresh=True`` where that matters.

    Communication: none.

    Example:
        >>> from torch import distributed as dist
        >>> from colossal.testing import reuse_processes, run_processes
        >>> with reuse_processes():  # the second call starts one process more
        ...     run_processes(dist.get_rank, 2), run_processes(dist.get_world_size, 3)
        ([0, 1], [3, 3, 3])
    """
    pool = _Pool()
    _pools.append(pool)
    try:
        yield
    finally:
        _pools.remove(pool)
        for process in pool.processes:
            if not process.has_ended:
                process.end(at_once=False)


def kept_pids() -> set[int]:
    """Return the processes that are kept now, so that a search for leaks can leave them out."""
    return {process.process.pid or 0 for pool in _pools for process in pool.processes if not process.has_ended}


@dataclass
class _RankRun:
    """What one process was asked to do, and what came back from it."""

    process: _Process
    order: Task
    result: Any = None
    error: str | None = None
    done: bool = False
    remains: Sequence[str] = ()

    @property
    def reason(self) -> str:
        """The error in one line: of a traceback the first line of the exception, of a stack where the process was."""
        _, _, stack = (self.error or "").partition("Current thread ")
        if stack:
            place = next((line.strip() for line in stack.splitlines() if line.startswith("  File ")), "?")
            return f"no end within {self.order.timeout_seconds:g} s. It was at {place}"
        lines = (self.error or "").splitlines()
        frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
        below = lines[frames[-1] :] if frames else lines
        return next((line for line in below if line and not line[0].isspace()), "no reason was given")

    @property
    def is_consequence(self) -> bool:
        """Whether another rank failed before: this one has lost it, or was waiting for it to the end."""
        waits = self.error is not None and "Current thread " in self.error and bool(_WAITS.search(self.error))
        return waits or LOST_PEER.search(self.reason) is not None

    def send(self) -> None:
        with suppress(BrokenPipeError):  # it is dead, and `receive` says so
            self.process.orders.send(self.order)

    def receive(self) -> None:
        self.done = True
        try:
            succeeded, content, self.remains = pickle.loads(self.process.replies.recv_bytes())  # noqa: S301 (our child)
        except EOFError:
            self.process.process.join()
            self.error = f"The process died with exit code {self.process.process.exitcode}.\n"
            return
        if succeeded:
            self.result = pickle.loads(content)  # noqa: S301 (from our own child)
        else:
            self.error = content

    def request_stack(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.process.pid or 0, signal.SIGUSR1)
        # the other process writes its stack when it gets the signal
        time.sleep(0.2)
        stack = self.order.stack_file
        self.error = "It did not come to an end. It was at:\n" + (stack.read_text() if stack.exists() else "?\n")


def run_processes(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    form: bool = True,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 600.0,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run a function on every rank of a job of processes on this host's CPU, joined as by `launch`, one thread each.

    Args:
        function: A function at the top level of a file, called on every rank.
        size: Number of ranks.
        *args: Passed to the function; pickled.
        form: Initialize the process group first; otherwise the function does it.
        environment: Variables to set in the processes; ``{rank}`` in a value stands for the rank.
        timeout_seconds: How long the ranks may take, and how long a collective waits for a peer. The environment
            variable ``COLOSSAL_TIMEOUT_SCALE`` multiplies it, for a machine that is busy or slow.
        fresh: Start new processes inside of `reuse_processes` too. Outside, and wherever `form` is False or an
            `environment` is given, each call gets new ones.
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
    pool = _pools[-1] if _pools and form and not environment and not fresh else None
    timeout_seconds = scaled(timeout_seconds)
    arguments = dumps((args, kwargs))
    file, module = inspect.getfile(function), function.__module__
    with tempfile.TemporaryDirectory(prefix="colossal-world-") as folder:
        orders = [
            Task(
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
                is_last=pool is None,
            )
            for rank in range(size)
        ]
        return _run(orders, pool.take(size) if pool else [_Process() for _ in range(size)], timeout_seconds)


def _run(orders: list[Task], processes: list[_Process], timeout_seconds: float) -> list[Any]:
    ranks = [_RankRun(process, order) for process, order in zip(processes, orders, strict=True)]
    try:
        failed = _collect(ranks, timeout_seconds)
    finally:
        _end(ranks)
    if failed:
        raise _failure(failed, len(ranks))
    return [rank.result for rank in ranks]


def _collect(ranks: list[_RankRun], timeout_seconds: float) -> list[_RankRun]:
    """Send all orders, and wait for all ranks; after a first failure, only a little longer."""
    for rank in ranks:
        rank.send()
    deadline = time.monotonic() + timeout_seconds
    failed: list[_RankRun] = []
    while waiting := {rank.process.replies: rank for rank in ranks if not rank.done}:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = next(r for p, r in waiting.items() if p is pipe)
            rank.receive()
            if rank.error is not None:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + scaled(GRACE_SECONDS))
    for rank in ranks:
        if not rank.done:
            rank.request_stack()
            failed.append(rank)
    return failed


def _failure(failed: list[_RankRun], size: int) -> WorldError:
    """The error whose first line says why a rank failed first; below it are the reports of all that did.

    The peers of a rank that fails may report that they lost it before its own error arrives, or wait for it.
    """
    ordered = sorted(failed, key=lambda rank: rank.is_consequence)
    reports = "\n".join(f"Rank {rank.order.rank}: {rank.error}" for rank in ordered)
    first = f"Rank {ordered[0].order.rank} of {size}: {ordered[0].reason}"
    return WorldError(f"{first}\n{len(failed)} of {size} processes failed, the first one first.\n{reports}")


def _end(ranks: list[_RankRun]) -> None:
    """End the processes that serve no further call; after a failure, all of them."""
    failed = not all(rank.done and rank.error is None for rank in ranks)
    for rank in ranks:
        if failed or rank.order.is_last or rank.remains:
            rank.process.end(at_once=not rank.done)


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
