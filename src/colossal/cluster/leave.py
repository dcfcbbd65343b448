"""The end of a process's part in the world."""

import time
from pathlib import Path

from torch import distributed as dist

from colossal.cluster.mesh import leave_ambient

DRAIN_SECONDS = 1.0
_PAUSE_SECONDS = 0.005
_TASKS = Path("/proc/self/task")
_WORKER = "pt_gloo_runloop"

# [Note: workers that outlive the interpreter]
# Gloo runs collectives in threads of its own. Such a thread may be the last owner of a tensor that Python made, and
# needs the interpreter to free it. If the interpreter is being torn down by then, the process dies of SIGABRT
# ("terminate called without an active exception") although all its work is done: seen with torch 2.13 under Python
# 3.11 on a busy machine, in a few of a hundred exits, with or without destroy_process_group(). So the program waits
# until these threads are asleep. Our own sleep hands them the interpreter: one that wants it is runnable afterwards.


def leave() -> None:
    """Dissolve the world, if there is one, and wait until its threads have let go of their tensors.

    Registered to run at exit by `launch`.
    """
    if dist.is_initialized():
        leave_ambient(None)
        dist.destroy_process_group()
    deadline = time.monotonic() + DRAIN_SECONDS
    time.sleep(_PAUSE_SECONDS)
    while _busy_workers() and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def _busy_workers() -> int:
    """Count the threads of gloo that are running or ready to run; none where the system does not tell."""
    stats = [_read(task / "stat") for task in (_TASKS.iterdir() if _TASKS.exists() else ())]
    states = [stat.rpartition(")")[2].split()[0] for stat in stats if f"({_WORKER}" in stat]
    return sum(state != "S" for state in states)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the thread has ended
        return ""
