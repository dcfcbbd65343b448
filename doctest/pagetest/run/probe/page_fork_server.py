"""A fork server: it has imported what a page imports of other packages, and forks into the page. Needs no harness."""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from page_probe import PageLoader, Probe
from page_supervisor import fork_supervised

MONITOR_SECONDS = 0.1
STOP_SECONDS = 30.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
HERE = str(Path(__file__).parent)

# [Note: warm processes]
# To import torch takes longer than to run a small page. So a process imports what the page's last run had imported of
# other packages, never the project's own modules, and each further run is a fork of it: the fork becomes `__main__` of
# the page as a fresh interpreter would, under the same probe, and leaves through the interpreter's own exit. For the
# harness nothing differs: a fork of a fork whose parent has gone is an orphan, which the harness adopts.
# Instead of torchrun one more fork keeps the store and does what torchrun's agent does: it gives each rank its
# environment and a session of its own, ends the others a moment after the first one failed, and then exits with 1.
# A process that has threads must not fork like this, so a server in which an import started one refuses to fork.


def serve(namespace: dict[str, Any], descriptor: int) -> None:
    """Serves requests until the harness closes the connection; returns in each fork, to run the page there."""
    # The connection carries one JSON object per line, both ways. The main module becomes the page's.
    sys.path[:] = [entry for entry in sys.path if entry not in {"", HERE}]
    script = os.environ["COLOSSAL_PAGE_SCRIPT"]
    probe = Probe(script)
    probe.install()
    with socket.socket(fileno=descriptor) as link, link.makefile("rw", encoding="utf-8") as lines:
        request = _answer_requests(lines)
    _become_command(request, probe)
    namespace["__cached__"] = None
    PageLoader(probe, script).run(namespace)


def _answer_requests(lines: Any) -> dict[str, Any]:
    """Forks a process for each request and returns the request in it; ends the server after the last one."""
    _send(lines, _preload(json.loads(lines.readline())["modules"]))
    for line in lines:
        request = json.loads(line)
        if (pid := _fork_detached()) == 0:
            return request
        _send(lines, {"pid": pid})
    os._exit(0)


def _send(lines: Any, content: dict[str, Any]) -> None:
    lines.write(json.dumps(content) + "\n")
    lines.flush()


def _preload(modules: list[str]) -> dict[str, Any]:
    """Imports the modules, or those that hold the names, and says whether it is safe to fork then."""
    for name in modules:
        for candidate in (name, name.rpartition(".")[0]):
            with suppress(Exception):
                importlib.import_module(candidate)
                break
    gc.collect()
    gc.freeze()  # what the page's collections and its end do not visit is not copied
    return {"threads": len(list(Path("/proc/self/task").iterdir()))}


def _fork_detached() -> int:
    """Forks a process that is no child of this one; returns its pid here, and 0 in it."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        with os.fdopen(reading) as pipe:
            pid = int(pipe.read())
        os.waitpid(between, 0)
        return pid
    pid = os.fork()
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    return 0


def _become_command(request: dict[str, Any], probe: Probe) -> None:
    """Makes this process what the command would have started."""
    os.setsid()
    os.chdir(request["folder"])
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    os.environ.update(request["environment"])
    sys.argv[:] = request["arguments"]
    sys.orig_argv[:] = [sys.executable, "-u", *request["arguments"]] if request["ranks"] else request["words"]
    fork_supervised()
    if request["ranks"]:
        _fork_ranks(request["ranks"])
    _refresh_inherited_state()
    probe.start(os.environ["COLOSSAL_PAGE_RUN"], int(os.environ.get("RANK", "0")))


def _refresh_inherited_state() -> None:
    """Renews what modules read from the server's process on import: its working folder and its random seed."""
    importlib.invalidate_caches()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.__dict__["ORIGINAL_DIR"] = str(Path.cwd())


def _fork_ranks(size: int) -> None:
    """Forks the ranks and returns in each; this process keeps the store, waits for the ranks and ends."""
    pipes = [os.pipe() for _ in range(size)]
    pids = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            _become_rank(rank, size, pipes)
            return
        pids.append(pid)
    for number in STOP_SIGNALS:
        signal.signal(number, _raise_stop)
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    for reading, writing in pipes:
        os.write(writing, str(store.port).encode())
        os.close(reading)
        os.close(writing)
    os._exit(_watch_ranks(pids))


def _become_rank(rank: int, size: int, pipes: list[tuple[int, int]]) -> None:
    os.setsid()
    port = ""
    for index, (reading, writing) in enumerate(pipes):
        os.close(writing)
        if index == rank:
            port = os.read(reading, 16).decode()
        os.close(reading)
    os.environ.update(_rank_environment(rank, size, port))


def _rank_environment(rank: int, size: int, port: str) -> dict[str, str]:
    """What torchrun sets for the ranks of one host."""
    errors = Path(os.environ["COLOSSAL_PAGE_RUN"]) / f"error.{rank}.json"
    same = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    same |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size))
    return same | {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "TORCHELASTIC_ERROR_FILE": str(errors),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"warm-{os.getppid()}",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


class _StopError(Exception):
    """This process was asked to end."""


def _raise_stop(_number: int, _frame: FrameType | None) -> None:
    raise _StopError


def _watch_ranks(pids: list[int]) -> int:
    """Waits for all ranks; after a first failure the others are ended."""
    living = set(pids)
    try:
        while living:
            pid, status = os.wait()
            living.discard(pid)
            if status:
                time.sleep(MONITOR_SECONDS)
                break
        else:
            return 0
    except _StopError:
        pass
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        _signal_all(living, number)
        deadline = time.monotonic() + seconds
        while living and time.monotonic() < deadline:
            living = {pid for pid in living if os.waitpid(pid, os.WNOHANG)[0] == 0}
            time.sleep(MONITOR_SECONDS / 10)
    return 1


def _signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, number)
