"""Starts a job on all its nodes, stays until it has ended on all of them, and ends it everywhere if it must."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import final

from colossal._src.cli.run import supervisor
from colossal._src.cli.run.node import Node
from colossal._src.cli.run.outcome import Ending, NodeEnd, Weight, first_failure, lost
from colossal._src.cli.run.output import Printer
from colossal.errors import LaunchError

SETTLE_SECONDS = 2.0
"""How long a node that only lost a peer waits for that peer's own reason, before the job is ended."""

_END_SECONDS = 8.0
_KILL_SECONDS = 12.0
_TICK_SECONDS = 0.25
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE


def connect_nodes(nodes: Sequence[Node]) -> None:
    """Reach all nodes at once."""
    with ThreadPoolExecutor(min(len(nodes), 64)) as pool:
        reasons = list(pool.map(_try_to_open, nodes))
    failed = [f"  {node.label}: {reason}" for node, reason in zip(nodes, reasons, strict=True) if reason]
    if failed:
        for node in nodes:
            node.link.close()
        found = "none of them" if len(failed) == len(nodes) else f"{len(failed)} of {len(nodes)} missing"
        raise LaunchError(f"All nodes must be reached. Found {found}; nothing was started.\n" + "\n".join(failed))


def _try_to_open(node: Node) -> str | None:
    try:
        node.link.open()
    except (LaunchError, OSError) as error:
        return str(error)
    return None


@final
class Launcher:
    """The nodes of one job, from their start to their end."""

    def __init__(self, nodes: Sequence[Node], printer: Printer) -> None:
        self._nodes, self._printer = nodes, printer
        self._events: SimpleQueue[NodeEnd | OSError | int] = SimpleQueue()
        self._ends: dict[int, NodeEnd] = {}
        self._end_at = float("inf")
        self._kill_at = float("inf")
        self._leave_at = float("inf")
        self._exit_code: int | None = None

    @property
    def ends(self) -> list[NodeEnd]:
        """How each node ended, by number."""
        return [self._ends[number] for number in sorted(self._ends)]

    @property
    def interrupted(self) -> str | None:
        """The signal that ended the job, if one did."""
        return None if self._exit_code is None else signal.Signals(self._exit_code - 128).name

    def run(self, start: Callable[[Node], None]) -> int:
        """Start every node, and return the exit code of the job once all have ended."""
        with self._signals(), self._beats():
            for node in self._nodes:
                try:
                    start(node)
                except OSError as error:
                    self._events.put(lost(node.number, node.label, f"Its connection went down: {error}."))
                else:
                    node.listen(self._printer, self._events.put)
            while len(self._ends) < len(self._nodes):
                self._take_event()
                self._keep_time()
        for node in self._nodes:
            node.link.close()
        if self._exit_code is not None:
            return self._exit_code
        guilty = first_failure(self.ends)
        return 0 if guilty is None else guilty.exit_code

    def _take_event(self) -> None:
        try:
            event = self._events.get(timeout=_TICK_SECONDS)
        except Empty:
            return
        if isinstance(event, NodeEnd):
            self._note(event)
        elif isinstance(event, OSError):
            self._interrupt(_BROKEN_PIPE_STATUS)
        else:
            self._interrupt(128 + event)

    def _note(self, end: NodeEnd) -> None:
        self._ends.setdefault(end.node, end)
        if end.ending in {Ending.FAILED, Ending.LOST}:
            wait = SETTLE_SECONDS if end.cause.weight is Weight.ECHO else 0.0
            self._end_at = min(self._end_at, time.monotonic() + wait)

    def _interrupt(self, code: int) -> None:
        """End the job gently; at once if the user insists."""
        if self._exit_code is None:
            self._exit_code, self._end_at = code, 0.0
        else:
            self._kill_at = 0.0

    def _keep_time(self) -> None:
        now = time.monotonic()
        if now >= self._end_at:
            self._say(supervisor.END)
            self._end_at, self._kill_at = float("inf"), min(self._kill_at, now + _END_SECONDS)
        if now >= self._kill_at:
            self._say(supervisor.KILL)
            self._kill_at, self._leave_at = float("inf"), now + _KILL_SECONDS
        if now >= self._leave_at:
            for node in self._waiting():
                self._note(lost(node.number, node.label, "It did not answer when the job was ended."))

    def _waiting(self) -> list[Node]:
        return [node for node in self._nodes if node.number not in self._ends]

    def _say(self, word: bytes) -> None:
        for node in self._waiting():
            node.say(word)

    @contextmanager
    def _beats(self) -> Iterator[None]:
        """Send heartbeats to the nodes."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(supervisor.BEAT_SECONDS):
                self._say(supervisor.STILL_HERE)

        # a supervisor that hears nothing for its timeout ends its processes
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Take the signals that end a program, unless we were started with them ignored, as by nohup."""
        before = {}
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda number, _: self._events.put(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                with suppress(ValueError):
                    signal.signal(number, handler)
