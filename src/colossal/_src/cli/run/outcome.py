"""How a job ended: the node at fault first, then the others."""

import signal
import time
from dataclasses import dataclass
from enum import Enum
from typing import final

from colossal._src.cli.run.failure_diagnosis import Cause, Weight


class Ending(Enum):
    """How a node's part ended."""

    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    ENDED = "ended"


@final
@dataclass(frozen=True)
class NodeEnd:
    """The end of one node's part."""

    node: int
    name: str
    ending: Ending
    status: int
    cause: Cause
    left: tuple[int, ...] = ()

    @property
    def exit_code(self) -> int:
        """What a shell would say: the exit status, or 128 and the number of the signal."""
        return 128 - self.status if self.status < 0 else self.status

    @property
    def place(self) -> str:
        """The node, by name and number."""
        return f"{self.name} (node {self.node})"

    @property
    def sentence(self) -> str:
        """What happened to the node."""
        code = f"failed with exit code {self.status}"
        how = f"was ended by {signal.Signals(-self.status).name}" if self.status < 0 else code
        what = {Ending.DONE: "had finished", Ending.FAILED: how, Ending.LOST: "was lost", Ending.ENDED: "was ended"}
        return f"{self.place} {what[self.ending]}"


def lost(node: int, name: str, reason: str) -> NodeEnd:
    """Return the end of a node that does not answer any more, or never did."""
    cause = Cause(Weight.CAUSE, time.monotonic(), "", (reason,))
    return NodeEnd(node, name, Ending.LOST, 1, cause)


def first_failure(ends: list[NodeEnd]) -> NodeEnd | None:
    """Return the node whose fault it was: the first with a reason of its own, not one that only lost its peers."""
    candidates = [
        end
        for end in ends
        if end.ending in {Ending.FAILED, Ending.LOST}
        or (end.ending is Ending.ENDED and end.cause.weight is Weight.CAUSE)
    ]
    return min(candidates, key=lambda end: (end.cause.weight, end.cause.since), default=None)


def report(ends: list[NodeEnd], interrupted: str | None = None) -> str:
    """Write what a user reads last: what ended the job, the node at fault with its error, then the others."""
    guilty = first_failure(ends)
    if interrupted is not None:
        lines = [f"{interrupted} ended the job on all nodes."]
        others = [end for end in ends if end.ending is Ending.LOST]
    elif guilty is not None:
        what = f"{guilty.place} failed" if guilty.ending is Ending.ENDED else guilty.sentence
        lines = [f"{what}, and so the job was ended on all nodes.", *_detail(guilty.cause)]
        others = [end for end in ends if end is not guilty and end.ending is not Ending.DONE]
    else:
        lines, others = [], []
    lines += [f"{end.sentence}{_aside(end)}" for end in others]
    lines += [f"{end.name} still runs {end.left}, which could not be killed." for end in ends if end.left]
    return "\n".join(lines)


def _detail(cause: Cause) -> list[str]:
    colon = ":" if cause.lines else "."
    return [*([f"{cause.title}{colon}"] if cause.title else []), *(f"    {line}" for line in cause.lines)]


def _aside(end: NodeEnd) -> str:
    if end.ending is Ending.LOST:
        return f": {end.cause.lines[0]}"
    return ", after it had lost a peer" if end.cause.weight is Weight.ECHO else ""
