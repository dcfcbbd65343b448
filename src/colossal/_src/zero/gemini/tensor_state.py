"""What is being done with a parameter that is in a chunk."""

from dataclasses import dataclass
from enum import Enum
from typing import final

import torch

from colossal.errors import ConfigError


@final
class TensorState(Enum):
    """What is being done with a parameter.

    Attributes:
        FREE: Nothing; its values are in shards.
        HOLD: Nothing just now; its full values are on the device.
        COMPUTE: An operation reads it.
        HOLD_AFTER_BWD: A backward pass has read it, and is going to bring its gradient.
        READY_FOR_REDUCE: Its gradient is in the buffer of the chunk.

    Source: Fang et al., "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management", 2021,
    https://arxiv.org/abs/2108.05818, section 6.

    Example:
        >>> from colossal.zero.gemini import TensorState
        >>> TensorState.HOLD.transition_to(TensorState.COMPUTE)
        <TensorState.COMPUTE: 2>
    """

    FREE = 0
    HOLD = 1
    COMPUTE = 2
    HOLD_AFTER_BWD = 3
    READY_FOR_REDUCE = 4

    def transition_to(self, new: "TensorState") -> "TensorState":
        """Go on to another state.

        Args:
            new: That state.

        Returns:
            The new state.

        Raises:
            ConfigError: It does not follow on this one: such as computing with what is not there.
        """
        if new is not self and new not in _FOLLOWS[self]:
            raise ConfigError(
                f"After {self.name} a parameter can be {', '.join(state.name for state in _FOLLOWS[self])}. Found a "
                f"step to {new.name}. Run forward and backward passes through the wrapped model and optimizer only."
            )
        return new


_FOLLOWS = {
    TensorState.FREE: (TensorState.HOLD, TensorState.READY_FOR_REDUCE),
    TensorState.HOLD: (TensorState.FREE, TensorState.COMPUTE, TensorState.READY_FOR_REDUCE),
    TensorState.COMPUTE: (TensorState.HOLD, TensorState.HOLD_AFTER_BWD),
    TensorState.HOLD_AFTER_BWD: (TensorState.COMPUTE, TensorState.READY_FOR_REDUCE, TensorState.HOLD, TensorState.FREE),
    TensorState.READY_FOR_REDUCE: (TensorState.HOLD, TensorState.FREE, TensorState.COMPUTE),
}
"""[Note: a parameter's way] It is gathered (FREE, HOLD), read by operations of the forward pass (COMPUTE, HOLD), by one
of the backward pass (COMPUTE, HOLD_AFTER_BWD), and its gradient arrives (READY_FOR_REDUCE). Gradients also arrive of
parameters whose values no backward pass has read, such as biases, and those of parameters that are not trained never
do."""


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
        >>> from colossal.zero.gemini import ChunkPlacement, MemoryTier
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
