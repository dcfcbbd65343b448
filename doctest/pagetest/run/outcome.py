"""The outcome of a session: how a command and all its processes ended."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Leftover:
    """A process that was still there after its command had ended."""

    pid: int
    command: str


@dataclass(frozen=True)
class Outcome:
    """How a session ended.

    Attributes:
        returncode: The command's exit code, negative for a signal.
        timed_out: Whether the limit was reached.
        seconds: Wall time of the command.
        peak_bytes: Greatest sum of the resident memory of all processes, sampled every tenth of a second.
        leftovers: Processes that outlived the command; they have been killed.
    """

    returncode: int
    timed_out: bool
    seconds: float
    peak_bytes: int
    leftovers: tuple[Leftover, ...]
