"""Ranks inside this process that are threads.

Ranks that are processes are those of `colossal.testing.run_processes`.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode  # pyright: ignore[reportAttributeAccessIssue]
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from colossal._src.cluster import serve_accelerator, set_ambient_mesh
from colossal._src.comm import uncounted
from colossal._src.testing.limits import scaled
from colossal._src.testing.processes import GRACE_SECONDS, WorldError

_TORCH = str(Path(torch.__file__).parent)


def _prepare_threads() -> None:
    """Let torch keep the process groups of each thread apart."""
    serve_accelerator("threaded")
    world = _install_threaded_pg()
    if not hasattr(world, "comms"):  # torch 2.11 asks for them when a group is destroyed, and has none here
        world.comms = []  # pyright: ignore[reportAttributeAccessIssue]
    ProcessLocalGroup.reduce = _reduce  # pyright: ignore[reportAttributeAccessIssue] (torch's has none)
    _set_thread_isolation_mode(True)


def run_threads(
    function: Callable[..., Any], size: int, *args: Any, timeout_seconds: float = 600.0, **kwargs: Any
) -> list[Any]:
    """Run a function on ranks that are threads of this process.

    Starts in a few hundredths of a second. Point-to-point operations are missing; generators of random numbers are
    shared by all ranks, so draw from a `torch.Generator` of each rank.

    Args:
        function: Called on every rank.
        size: Number of ranks.
        *args: Passed to the function; tensors are shared, not copied.
        timeout_seconds: How long the ranks may take; ``COLOSSAL_TIMEOUT_SCALE`` multiplies it, as in `run_processes`.
        **kwargs: Passed to the function.

    Returns:
        What the function returned, by rank.

    Raises:
        WorldError: The function raised on a rank, or the ranks took too long, such as one that waits in a collective
            which another has not called.

    Communication: none outside of this process.

    Example:
        >>> from torch import distributed as dist
        >>> from colossal.testing import run_threads
        >>> run_threads(lambda start: start + dist.get_rank(), 3, 10)
        [10, 11, 12]
    """
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []
    store = dist.HashStore()
    _prepare_threads()

    def be_rank(rank: int) -> None:
        set_ambient_mesh(None)  # of its own, not that of the main thread
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        try:
            with uncounted():
                results[rank] = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 (reported by the caller's thread)
            errors.append((rank, error))
            # wakes the ranks that wait for this one in a collective
            ProcessLocalGroup.exception_handle(error)
        finally:
            set_ambient_mesh(None)
            dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=Context().run, args=(be_rank, rank), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        waiting = _join(threads, scaled(timeout_seconds))
    finally:
        _set_thread_isolation_mode(False)
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
    woken = all(isinstance(error, SystemExit) for _, error in errors)
    if waiting and woken:
        rank, place = next(iter(waiting.items()))
        raise WorldError(f"Rank {rank} of {size}: no end within {scaled(timeout_seconds):g} s. It was at {place}")
    if errors:
        rank, error = errors[0]
        (reason, *_) = traceback.format_exception_only(error)[0].splitlines()
        raise WorldError(f"Rank {rank} of {size}: {reason}\n" + "".join(traceback.format_exception(error)))
    return results


def _join(threads: list[threading.Thread], seconds: float) -> dict[int, str]:
    """Wait for ranks; return where those are that are not done in time, and wake them if they wait for each other."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    frames = sys._current_frames()  # noqa: SLF001 (documented, for debuggers)
    waiting = {
        rank: _place(traceback.extract_stack(frames[thread.ident]))
        for rank, thread in enumerate(threads)
        if thread.is_alive() and thread.ident in frames
    }
    if waiting:
        ProcessLocalGroup.exception_handle(TimeoutError())
        for thread in threads:
            thread.join(GRACE_SECONDS)
    return waiting


def _place(stack: traceback.StackSummary) -> str:
    """Where a rank is: its own line first, then all that it called."""
    own = [frame for frame in stack if not frame.filename.startswith((_TORCH, threading.__file__))]
    frame = (own or stack)[-1]
    return f'File "{frame.filename}", line {frame.lineno} in {frame.name}\n' + "".join(stack.format())


def _reduce(group: ProcessLocalGroup, tensors: list[torch.Tensor], options: dist.ReduceOptions) -> dist.Work:
    """Sum up for one rank, by doing so for all of them."""
    to_all = dist.AllreduceOptions()
    to_all.reduceOp = options.reduceOp
    totals = [tensor.clone() for tensor in tensors]
    work = group.allreduce(totals, to_all)
    if group.rank() == options.rootRank:
        for tensor, total in zip(tensors, totals, strict=True):
            tensor.copy_(total)
    return work
