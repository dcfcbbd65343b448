"""Destroy the process group at exit."""

import time
from pathlib import Path

from torch import distributed as dist

from colossal._src.cluster.config import set_current_config
from colossal._src.cluster.mesh import set_ambient_mesh

DRAIN_SECONDS = 2.0
_PAUSE_SECONDS = 0.02
_TASKS = Path("/proc/self/task")
_WORKER = "Name:\tpt_gloo_runloop"
_SWITCHES = "voluntary_ctxt_switches:"

# [Note: workers that outlive the interpreter]
# Gloo runs collectives in threads of its own. Such a thread may be the last owner of a tensor that Python made, and
# needs the interpreter to free it. If the interpreter is being torn down by then, the process dies of SIGABRT
# ("terminate called without an active exception") although all its work is done: seen with torch 2.13 under Python
# 3.11, in a few of a hundred exits, with or without destroy_process_group(). So the program waits until these threads
# are at rest. To see one asleep is not enough: it may be waiting for the interpreter that we hold while we look. But a
# thread that wants the interpreter wakes up at least every 5 ms to ask for it. One that has not woken up at all while
# we slept, and left the interpreter to whoever wanted it, wants nothing.


def leave() -> None:
    """Destroy the process group, if there is one, and wait until its threads have released their tensors.

    Registered to run at exit by `launch`.
    """
    if dist.is_initialized():
        set_ambient_mesh(None)
        set_current_config(None)
        dist.destroy_process_group()
    deadline = time.monotonic() + DRAIN_SECONDS
    before, now = None, _wake_ups()
    while before != now and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        before, now = now, _wake_ups()


def _wake_ups() -> dict[str, object]:
    """Return how often each thread of gloo went to sleep so far; of one that is awake, something new at each call."""
    tasks = {task.name: _read(task / "status") for task in (_TASKS.iterdir() if _TASKS.exists() else ())}
    return {name: _sleeps(status) for name, status in tasks.items() if status.startswith(_WORKER)}


def _sleeps(status: str) -> object:
    rows = [line for line in status.splitlines() if line.startswith((_SWITCHES, "State:\tS"))]
    return tuple(rows) if len(rows) == len(("asleep", "how often")) else object()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the thread has ended
        return ""
