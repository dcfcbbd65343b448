"""The events of a run: what the probes of its processes recorded, what was printed and drawn, and stack samples."""

import ast
import math
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pagetest.limits import scaled
from pagetest.outputs.blocks import printed_by_block
from pagetest.run.probe.page_output import CapturedOutput

STACK_SECONDS = 5.0

_HIDDEN = "(caught, where a check that fails must end the page: let it pass)"
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class StackSample:
    """Where a rank was when its stack was requested."""

    rank: int
    line: int  # the page's line, 0 where the page was not on the stack
    innermost: str  # the innermost function and its file, where that is not the page's
    is_waiting: bool  # whether it was waiting for other ranks, inside torch.distributed


@dataclass(frozen=True)
class RunEvents:
    """What the processes of a page recorded while it ran."""

    folder: Path
    script: Path

    @cached_property
    def all_events(self) -> tuple[dict[str, Any], ...]:
        """All events in the order of their time."""
        file = self.folder / "events"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return tuple(sorted((ast.literal_eval(line) for line in lines), key=lambda event: event["time"]))

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.all_events if event["kind"] == kind]

    @property
    def has_started(self) -> bool:
        """Whether the page's own process was seen."""
        return any(event["main"] for event in self.events_of("started"))

    @property
    def failure_events(self) -> list[dict[str, Any]]:
        """How the processes that ran the page failed before their time was up, the first one first."""
        limit = min((event["time"] for event in self.events_of("asked")), default=math.inf)
        found = [event for event in self.events_of("failed") if event["pid"] in self._mains]
        known = [(event["pid"], event["message"]) for event in found]
        hidden = [event for event in self.events_of("assertion_failed") if not _is_among(event, known)]
        found += [event | {"message": f"{event['message']} {_HIDDEN}"} for event in hidden]
        return sorted((event for event in found if event["time"] < limit), key=lambda event: event["time"])

    @property
    def unfinished_events(self) -> list[dict[str, Any]]:
        """The processes that ran the page and did not come to its end."""
        ended = {event["pid"] for event in self.events_of("ended")}
        return [event for event in self.events_of("started") if event["main"] and event["pid"] not in ended]

    def reached(self, rank: int | None = None) -> frozenset[int]:
        """The numbers of the marks that were reached, on one rank or on any."""
        ends = [event for event in self.events_of("finished") if rank is None or event["rank"] == rank]
        return frozenset(number for event in ends for number in event["ran"])

    @property
    def _mains(self) -> set[int]:
        return {event["pid"] for event in self.events_of("started") if event["main"]}

    @property
    def device(self) -> str:
        """`cuda` if the page used it, else `cpu`; empty where the page was killed before it could say."""
        return max((event["device"] for event in self.events_of("finished")), default="")

    @property
    def backend(self) -> str:
        """The backend that served the device in the page's process group; empty without a group."""
        for event in self.events_of("group"):
            by_device = dict(part.split(":", 1) for part in event["backend"].split(",") if ":" in part)
            return by_device.get(self.device) or "+".join(sorted(set(by_device.values()))) or event["backend"]
        return ""

    @property
    def world_size(self) -> int:
        """The size of the process group, or the number of processes that ran the page."""
        ranks = {event["rank"] for event in self.events_of("started") if event["main"]}
        return max((event["world"] for event in self.events_of("group")), default=len(ranks))

    @property
    def printed(self) -> dict[int, str]:
        """What each block printed on rank 0, by the block's line."""
        blocks = self.block_events
        return printed_by_block(blocks, CapturedOutput(self.folder).file.read_bytes()) if blocks else {}

    @property
    def figure_lines(self) -> dict[str, int]:
        """The line of the block that drew each figure last; what was drawn after the last block is not in it."""
        blocks = self.block_events
        return {name: before["line"] for before, block in pairwise(blocks) for name in block["drawn"]}

    @property
    def block_events(self) -> list[dict[str, Any]]:
        """Where rank 0 went from block to block."""
        first = next(
            (event["pid"] for event in self.events_of("started") if event["main"] and event["rank"] == 0), None
        )
        return [event for event in self.events_of("block") if event["pid"] == first]

    @property
    def process_starts(self) -> dict[int, int]:
        """The page's line that started each process."""
        return {event["child"]: event["line"] for event in self.events_of("child")}

    def request_stacks(self) -> None:
        """Makes every process of the page write its stack."""
        with (self.folder / "events").open("a", encoding="utf-8") as events:
            events.write(f"{ {'kind': 'asked', 'time': time.time()}!r}\n")
        asked = []
        for event in RunEvents(self.folder, self.script).events_of("started"):
            with suppress(ProcessLookupError):
                os.kill(event["pid"], signal.SIGUSR1)
                asked.append(self.folder / f"stacks.{event['rank']}.{event['pid']}")
        deadline = time.monotonic() + scaled(STACK_SECONDS)
        while any(not file.stat().st_size for file in asked) and time.monotonic() < deadline:
            time.sleep(0.02)

    def stack_samples(self) -> list[StackSample]:
        """Where each process was when it was asked, or when a fatal signal ended it; those who wait come last."""
        files = {file: file.read_text(encoding="utf-8", errors="replace") for file in self.folder.glob("stacks.*")}
        found = [self._parse_stack(int(file.name.split(".")[1]), text) for file, text in files.items() if text]
        return sorted(found, key=lambda sample: (sample.is_waiting, sample.line, sample.rank))

    def _parse_stack(self, rank: int, text: str) -> StackSample:
        threads = [_FRAME.findall(thread) for thread in re.split(r"\n(?=Current thread|Thread)", text)]
        of_page = [frames for frames in threads if any(file == str(self.script) for file, _, _ in frames)]
        frames = [*of_page, *threads][0]
        line = next((int(number) for file, number, _ in frames if file == str(self.script)), 0)
        file, _, function = frames[0] if frames else ("", "", "")
        inside = "" if file == str(self.script) else f"{function} ({Path(file).name})"
        return StackSample(rank, line, inside, any("/torch/distributed/" in file for file, _, _ in frames))


def _is_among(event: dict[str, Any], known: list[tuple[int, str]]) -> bool:
    """Whether one of the messages of its process begins as that of the event does."""
    return any(pid == event["pid"] and message.startswith(event["message"]) for pid, message in known)
