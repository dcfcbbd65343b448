"""Where what a chunk consists of is kept."""

from dataclasses import dataclass
from enum import Enum
from typing import final

import torch


@final
class MemoryTier(Enum):
    """A kind of memory.

    Attributes:
        DEVICE: Where the model computes.
        HOST: The memory of the host; page-locked on request.
        DISK: A file on a fast disk.

    Example:
        >>> from colossal.zero.gemini import MemoryTier
        >>> [tier.name for tier in MemoryTier]
        ['DEVICE', 'HOST', 'DISK']
    """

    DEVICE = 0
    HOST = 1
    DISK = 2


@final
@dataclass(frozen=True)
class ChunkPlacement:
    """Where the parts of a chunk are between their uses.

    Args:
        parameters: This rank's segment of the parameters.
        optimizer: Its master, gradient and optimizer states.
        is_full: Every rank keeps all of the parameters on its device.

    Example:
        >>> from colossal.zero.gemini import MemoryTier
        >>> from colossal._src.zero.gemini import ChunkPlacement
        >>> ChunkPlacement(MemoryTier.HOST, MemoryTier.HOST).is_full
        False
    """

    parameters: MemoryTier = MemoryTier.DEVICE
    optimizer: MemoryTier = MemoryTier.DEVICE
    is_full: bool = False

    def optimizer_device(self, device: torch.device) -> torch.device:
        """Return the device of the optimizer's tensors.

        Args:
            device: Where the model computes.

        Returns:
            The device of the master.
        """
        return device if self.optimizer is MemoryTier.DEVICE else torch.device("cpu")
