"""What runs on a node: it starts the job there, reports what the job prints, and ends all of its processes.

This file is sent to each node as text and runs under ``python -I -c``: it imports the standard library only, and knows
nothing of this package. It reads, and then listens, at its standard input: first the order, one line of JSON; then one
byte at a time, ``.`` for "still here", ``e`` for "end the job", ``k`` for "kill it". It writes frames to its standard
output: a letter, a length, and so many bytes.

[Note: no process is left] Ranks live in sessions of their own, so that no signal to a process group reaches all of
them. Therefore the supervisor makes itself the parent of every orphan below it (a subreaper): whatever the job starts
stays below it in the tree of processes until it is dead. The supervisor ends that tree when the job ends, when it is
asked to, when its standard input closes (the launcher or its connection died), and when nothing has come for too long
(the network died). Should the supervisor itself be killed, its guard, a process above it that does nothing else, kills
what was below it; should the guard be killed, the supervisor ends the job.
"""

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

MAGIC = b"\0colossal-node\0"
FRAME = struct.Struct(">cI")
STARTED, OUT, ERR, BEAT, REFUSED, ENDED = b"S", b"O", b"E", b"B", b"R", b"X"
STILL_HERE, END, KILL = b".", b"e", b"k"

BEAT_SECONDS = 1.0
_GRACE_SECONDS = 5.0
_KILL_SECONDS = 10.0
_TICK_SECONDS = 0.05
_CHUNK_BYTES = 65536
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_NO_STREAM = -1


class Reporter:
    """Writes frames, one at a time; once the launcher is gone it stays silent."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def write(self, letter: bytes, content: bytes = b"") -> None:
        """Write a frame."""
        with self._lock:
            try:
                self._stream.write(FRAME.pack(letter, len(content)) + content)
                self._stream.flush()
            except (OSError, ValueError):
                # what is written later goes nowhere instead of failing again
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class Watch:
    """Listens to the launcher; ``verdict`` says what it wants, or that it is gone."""

    def __init__(self, stream: IO[bytes], timeout: float) -> None:
        self._stream, self._timeout = stream, timeout
        self._last = time.monotonic()
        self._order = b""
        # Linux sends it as well, when the guard dies
        signal.signal(signal.SIGTERM, self._asked)
        threading.Thread(target=self._listen, daemon=True).start()

    def _asked(self, *_: Any) -> None:
        self._order = self._order or END

    def _listen(self) -> None:
        while True:
            word = self._stream.read(1)
            self._last = time.monotonic()
            if word in (END, KILL, b""):
                self._order = word or KILL
            if not word:
                return

    def verdict(self) -> bytes:
        """Return END or KILL if the job is to end, else nothing."""
        return self._order or (KILL if time.monotonic() - self._last > self._timeout else b"")


def serve(source: IO[bytes], sink: IO[bytes], libc: Any) -> None:
    """Carry out one order, from its first line to the last frame."""
    order = json.loads(source.readline())
    sink.write(MAGIC)
    reporter = Reporter(sink)
    refusal = _refusal(order)
    if refusal:
        reporter.write(REFUSED, refusal.encode())
        return
    job = _start(order, libc)
    reporter.write(STARTED)
    pumps = [
        threading.Thread(target=_pump, args=(stream, letter, reporter), daemon=True)
        for stream, letter in ((job.stdout, OUT), (job.stderr, ERR))
        if stream is not None
    ]
    threading.Thread(target=_beat, args=(reporter,), daemon=True).start()
    for pump in pumps:
        pump.start()
    status = _attend(job.pid, Watch(source, order["timeout"]))
    for pump in pumps:
        # a process that could not be killed may keep its end of the stream open forever
        pump.join(_KILL_SECONDS if _descendants() else None)
    reporter.write(ENDED, json.dumps({"status": status, "left": _descendants()}).encode())


def _refusal(order: dict[str, Any]) -> str:
    """Say what this node lacks: the folder or the program."""
    folder, program = order["folder"], order["program"]
    try:
        os.chdir(folder)
    except OSError as error:
        return (
            f"The job runs in the folder {folder} on every node. Found: {error.strerror}. "
            "Create it there, or pass --workdir."
        )
    if program and not Path(program).is_file():
        return f"Every node needs the program {program}. Found none in {folder}. Copy it there, or use a shared folder."
    return ""


def _start(order: dict[str, Any], libc: Any) -> "subprocess.Popen[bytes]":
    # torchrun gives its workers 1 where nothing is set, torch's own default is 3: to end a process whose collective
    # failed without waiting for connections that may hang, after what the ranks did last was written down.
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", **os.environ, **order["environment"]}
    if order["path"]:
        environment["PATH"] = os.pathsep.join([order["path"], environment.get("PATH", os.defpath)])
    streams = order["streams"] or [_NO_STREAM, subprocess.PIPE, subprocess.PIPE]
    return subprocess.Popen(  # noqa: S603 (running the job is the purpose)
        order["command"],
        env=environment,
        stdin=subprocess.DEVNULL if streams[0] == _NO_STREAM else streams[0],
        stdout=streams[1],
        stderr=streams[2],
        preexec_fn=lambda: _prepare(libc),  # noqa: PLW1509 (no other thread runs yet)
    )


def _prepare(libc: Any) -> None:
    """Let torchrun end when the supervisor dies, and let the job have signals as a shell would give them."""
    libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def _pump(stream: IO[bytes], letter: bytes, reporter: Reporter) -> None:
    while True:
        chunk = os.read(stream.fileno(), _CHUNK_BYTES)
        if not chunk:
            return
        reporter.write(letter, chunk)


def _beat(reporter: Reporter) -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        reporter.write(BEAT)


def _attend(child: int, watch: Watch) -> int:
    """Wait until the job ended, by itself or by us, and everything below us with it; return how the child ended."""
    status, asked, deadline = None, False, float("inf")
    while status is None:
        status = _reap(child)
        verdict = watch.verdict()
        if verdict == END and not asked:
            asked, deadline = True, time.monotonic() + _GRACE_SECONDS
            # torchrun passes it on to its ranks
            _signal([child], signal.SIGTERM)
        if verdict == KILL or time.monotonic() > deadline:
            break
        time.sleep(_TICK_SECONDS)
    if watch.verdict() != KILL and status is not None:
        status = _end_rest(child, watch, status)
    return _kill_rest(child, status)


def _end_rest(child: int, watch: Watch, status: int) -> int:
    """Give the processes that the job left a moment to end by themselves."""
    deadline = time.monotonic() + _GRACE_SECONDS
    _signal(_descendants(), signal.SIGTERM)
    while _descendants() and time.monotonic() < deadline and watch.verdict() != KILL:
        _reap(child)
        time.sleep(_TICK_SECONDS)
    return status


def _kill_rest(child: int, status: "int | None") -> int:
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := _descendants()) and time.monotonic() < deadline:
        _signal(left, signal.SIGKILL)
        ended = _reap(child)
        status = ended if status is None else status
        time.sleep(_TICK_SECONDS)
    return -signal.SIGKILL if status is None else status


def _reap(child: int) -> "int | None":
    """Collect who has died, orphans too; return how the child ended if it is among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            status = os.waitstatus_to_exitcode(ended)


def _descendants() -> "list[int]":
    """Return everything below this process that runs, as /proc shows it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # the name of a process, in parentheses, may itself contain spaces and parentheses
                rest = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(rest[1])
    below, found = {os.getpid()}, []
    while True:
        new = [pid for pid, parent in parents.items() if parent in below and pid not in below]
        if not new:
            return found
        below.update(new)
        found += new


def _signal(pids: "list[int]", number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def guard(supervisor: int) -> None:
    """Stay above the supervisor until it has ended, then kill what is left."""
    signal.signal(signal.SIGTERM, lambda *_: _signal([supervisor], signal.SIGTERM))
    while _reap(supervisor) is None:
        time.sleep(_TICK_SECONDS)
    _kill_rest(supervisor, 0)


def main() -> None:
    """Part into guard and supervisor."""
    libc = ctypes.CDLL(None)
    # orphans of the job become children of this process, which finds and ends them
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # without the supervisor nothing would end the ranks; `_prepare` gives the job these signals again
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    supervisor = os.fork()
    if supervisor:
        guard(supervisor)
    else:
        libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a fork does not inherit it
        serve(sys.stdin.buffer, sys.stdout.buffer, libc)
    os._exit(0)


if __name__ == "__main__":
    main()
