"""Where what a chunk consists of is kept."""

from dataclasses import dataclass
from enum import Enum
from typing import final

import torch


@final
class Tier(Enum):
    """A kind of memory.

    Attributes:
        DEVICE: Where the model computes.
        HOST: The memory of the host; page-locked on request.
        DISK: A file on a fast disk.

    Example:
        >>> from colossal.zero.gemini import Tier
        >>> [tier.name for tier in Tier]
        ['DEVICE', 'HOST', 'DISK']
    """

    DEVICE = 0
    HOST = 1
    DISK = 2


@final
@dataclass(frozen=True)
class Home:
    """Where the parts of a chunk are between their uses.

    Args:
        parameters: This rank's share of the parameters.
        optimizer: Its master, gradient and optimizer states.
        is_whole: Every rank keeps all of the parameters on its device.

    Example:
        >>> from colossal.zero.gemini import Home, Tier
        >>> Home(Tier.HOST, Tier.HOST).is_whole
        False
    """

    parameters: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE
    is_whole: bool = False

    def moves_to(self, device: torch.device) -> torch.device:
        """Tell where the optimizer's part is as torch names it.

        Args:
            device: Where the model computes.

        Returns:
            The device of the master.
        """
        return device if self.optimizer is Tier.DEVICE else torch.device("cpu")
