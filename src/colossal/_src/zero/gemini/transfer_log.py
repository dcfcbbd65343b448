"""What moved between the tiers, and when."""

from dataclasses import dataclass, field
from typing import Literal, final

Event = Literal["gather", "prefetch", "evict", "upload", "download", "reduce"]


@final
@dataclass(frozen=True)
class Transfer:
    """One thing that happened to a chunk.

    Args:
        period: How many accesses the pass had seen.
        event: What happened.
        chunk: The number of the chunk.
        num_bytes: How much it was.
        model_data: Bytes of model data on the device afterwards.
        activations: Bytes of non-model data there.

    Example:
        >>> from colossal.zero.gemini import Transfer
        >>> Transfer(0, "gather", 2, 1024, 4096, 0).event
        'gather'
    """

    period: int
    event: Event
    chunk: int
    num_bytes: int
    model_data: int
    activations: int


@final
@dataclass
class TransferLog:
    """Counts the bytes of transfers, and records each transfer on request.

    Args:
        is_recording: Record each transfer.

    Attributes:
        moves: The recorded transfers.
        num_bytes: The bytes of all transfers, by event.

    Example:
        >>> from colossal.zero.gemini import TransferLog
        >>> traffic = TransferLog()
        >>> traffic.count("upload", 100)
        >>> traffic.num_bytes["upload"]
        100
    """

    is_recording: bool = False
    moves: list[Transfer] = field(default_factory=list)
    num_bytes: dict[Event, int] = field(default_factory=dict)

    def count(self, event: Event, num_bytes: int) -> None:
        """Add to the bytes of an event.

        Args:
            event: What happened.
            num_bytes: How much it was.
        """
        self.num_bytes[event] = self.num_bytes.get(event, 0) + num_bytes
