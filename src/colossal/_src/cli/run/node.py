"""One node while the job runs: shows what it prints, and reports how it ends."""

import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, final

from colossal._src.cli.run import supervisor
from colossal._src.cli.run.connection import NodeConnection
from colossal._src.cli.run.outcome import Ending, FailureDiagnosis, NodeEnd, lost
from colossal._src.cli.run.output import Lines, Printer

_NOISE_BYTES = 65536


@final
class Frames:
    """Splits a stream of bytes into frames.

    What comes before the first one is noise: a login shell's greeting, or a complaint that there is no Python.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether the supervisor has answered."""
        return self._begun

    @property
    def noise(self) -> str:
        """What came instead of an answer."""
        return "" if self._begun else self._rest.decode(errors="replace").strip()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Add received bytes; yield letter and content of each complete frame."""
        self._rest += data
        if not self._begun and not self._begin():
            return
        head = supervisor.FRAME.size
        while len(self._rest) >= head:
            letter, length = supervisor.FRAME.unpack_from(self._rest)
            if len(self._rest) < head + length:
                return
            content, self._rest = self._rest[head : head + length], self._rest[head + length :]
            yield letter, content

    def _begin(self) -> bool:
        noise, magic, rest = self._rest.partition(supervisor.MAGIC)
        self._begun = bool(magic)
        self._rest = rest if magic else noise[-_NOISE_BYTES:]
        return self._begun


_POLL_SECONDS = 0.5
_GUARD_SECONDS = 10.0


@final
class Node:
    """A supervisor at the other end of a link, with a thread that reads what it says."""

    def __init__(self, number: int, label: str, link: NodeConnection, timeout: float | None) -> None:
        self.number, self.label, self.link = number, label, link
        self.evidence = FailureDiagnosis()
        self._timeout = timeout
        self._frames = Frames()
        self._lines = {supervisor.OUT: Lines(), supervisor.ERR: Lines()}
        self._asked_to_end = False
        self._thread: threading.Thread | None = None

    def order(self, command: list[str], details: Mapping[str, Any]) -> None:
        """Send the supervisor itself, and what it shall start; OSError if the link is down."""
        source = inspect.getsource(supervisor).encode()
        order = {"command": command, "timeout": self._timeout or float("inf"), **details}
        self.link.send(b"%d\n" % len(source) + source + json.dumps(order).encode() + b"\n")

    def listen(self, printer: Printer, report: Callable[[NodeEnd | OSError], None]) -> None:
        """Start the thread, which prints what it receives and reports once how the node ended."""
        self._thread = threading.Thread(target=self._run, args=(printer, report), daemon=True)
        self._thread.start()

    def say(self, word: bytes) -> None:
        """Send a word to the supervisor; a link that is down is noticed where it is read."""
        if word != supervisor.STILL_HERE:
            self._asked_to_end = True
        with suppress(OSError):
            self.link.send(word)

    def _run(self, printer: Printer, report: Callable[[NodeEnd | OSError], None]) -> None:
        end = None
        while end is None:
            try:
                end = self._next(printer)
            except OSError as error:
                report(error)  # our output is closed: go on listening until the node has ended
        if end.ending is not Ending.LOST:
            self._wait_for_guard()
        report(end)

    def _wait_for_guard(self) -> None:
        """Wait until the link is down, which it is when the supervisor's guard, the last process there, has left."""
        deadline = time.monotonic() + _GUARD_SECONDS
        with suppress(OSError):
            while self.link.receive(_POLL_SECONDS) != b"" and time.monotonic() < deadline:
                continue

    def _next(self, printer: Printer) -> NodeEnd | None:
        """Take in what comes next; return the end if it is that."""
        data = self._receive(printer)
        if data is None:
            return self._lost(f"Nothing came from it for {self._timeout:g} s: its connection is lost, or it hangs.")
        if not data:
            return self._closed()
        end = None
        for letter, content in self._frames.feed(data):
            end = self._take(letter, content, printer) or end
        return end

    def _receive(self, printer: Printer) -> bytes | None:
        """Wait for bytes, and meanwhile show lines that stay open; None once the node has been silent for too long."""
        deadline = time.monotonic() + (self._timeout or float("inf"))
        while time.monotonic() < deadline:
            data = self.link.receive(_POLL_SECONDS)
            for letter, lines in self._lines.items():
                self._show(letter, lines.stale(), printer)
            if data is not None:
                return data
        return None

    def _take(self, letter: bytes, content: bytes, printer: Printer) -> NodeEnd | None:
        if letter in self._lines:
            self._show(letter, self._lines[letter].feed(content), printer)
        elif letter == supervisor.REFUSED:
            return self._lost(content.decode())
        elif letter == supervisor.ENDED:
            for kind, lines in self._lines.items():
                self._show(kind, lines.stale(0.0), printer)
            return self._ended(**json.loads(content))
        return None

    def _show(self, letter: bytes, lines: list[str], printer: Printer) -> None:
        for line in lines:
            if letter == supervisor.ERR:
                self.evidence.add(line)
            printer.write(self.number, line, error=letter == supervisor.ERR)

    def _ended(self, status: int, left: list[int]) -> NodeEnd:
        ending = Ending.DONE if status == 0 else Ending.ENDED if self._asked_to_end else Ending.FAILED
        return NodeEnd(self.number, self.label, ending, status, self.evidence.cause(), tuple(left))

    def _closed(self) -> NodeEnd:
        """Explain a link that went down before the end."""
        answer = "\n".join(filter(None, [self._frames.noise, self.link.complaint()]))
        if self._frames.begun:
            return self._lost(f"Its connection or its supervisor died. {answer}".strip())
        return self._lost(
            f"Its Python must start there. Found: {answer or 'no answer'}. "
            "Install the same environment at the same place, or pass --python."
        )

    def _lost(self, reason: str) -> NodeEnd:
        return lost(self.number, self.label, reason)
