"""The live view: what one page does while it runs, for somebody who watches it in a terminal."""

import codecs
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagetest.finding import display_path
from pagetest.model.page import Heading, Page
from pagetest.run.events import RunEvents
from pagetest.run.probe.page_output import CapturedOutput

NEWLINE = "\n"

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"

# [Note: what is read first]
# The probe notes when rank 0 goes from block to block, with the size of what it has printed by then. What is printed
# goes to another file. A view that read the notes first could find output of a block whose note it has not seen, and
# would show it above the block's heading. So it reads first how much is printed, and then the notes.


@dataclass
class LiveView:
    """Shows the headings of a page as its blocks are reached, what rank 0 prints, and the figures that it draws."""

    page: Page
    events: RunEvents
    folder: Path
    _num_blocks: int = 0
    _num_bytes: int = 0
    _heading: int = 0
    _last: str = NEWLINE
    _decoder: Any = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    def show_new(self) -> None:
        """Shows what is new since it was called last."""
        printed = CapturedOutput(self.events.folder)
        size = printed.size if printed.is_requested else 0
        blocks = RunEvents(self.events.folder, self.events.script).block_events
        for block in blocks[self._num_blocks :]:
            self._print_output(printed.file, block["size"])
            self._print_lines(f"figure: {display_path(self.folder / name)}" for name in block["drawn"])
            self._print_lines(self._headings(block["line"]) if block["line"] else [""])
        self._num_blocks = len(blocks)
        self._print_output(printed.file, size)

    def _print_output(self, file: Path, end: int) -> None:
        """Shows what was printed up to a size of the file."""
        if end > self._num_bytes:
            with file.open("rb") as data:
                data.seek(self._num_bytes)
                text = self._decoder.decode(data.read(end - self._num_bytes))
            self._num_bytes, self._last = end, text[-1:] or self._last
            _write(text)

    def _print_lines(self, lines: Iterable[str]) -> None:
        """Shows lines of our own, below what the page printed."""
        for line in lines:
            _write(f"{'' if self._last == NEWLINE else NEWLINE}{line}\n")
            self._last = NEWLINE

    def _headings(self, line: int) -> Iterator[str]:
        """The heading above a block, and those above it which were not shown yet."""
        above = [heading for heading in self.page.headings if heading.line < line]
        path: list[Heading] = []
        for heading in reversed(above):
            if not path or heading.level < path[-1].level:
                path.append(heading)
        for heading in reversed(path):
            if heading.line > self._heading:
                self._heading = heading.line
                yield f"\n{_BOLD}{'#' * heading.level} {heading.text}{_PLAIN}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def is_terminal() -> bool:
    """Whether somebody watches, in a terminal that can do more than print."""
    return os.isatty(1) and os.environ.get("TERM", "") != "dumb"
