"""Where chunks are kept, and how many may be gathered at a time."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from colossal._src.zero.gemini.access_trace import AccessTrace
from colossal._src.zero.gemini.device_memory import DeviceMemory
from colossal._src.zero.gemini.tensor_state import ChunkPlacement, MemoryTier
from colossal.errors import ConfigError


class PlacementPolicy(ABC):
    """Decides where each chunk is kept, and how much memory temporarily gathered chunks may take.

    Example:
        >>> from colossal.zero.gemini import StaticPlacement
        >>> from colossal._src.zero.gemini import PlacementPolicy
        >>> isinstance(StaticPlacement(), PlacementPolicy)
        True
    """

    @abstractmethod
    def place_chunks(self, sizes: Sequence[int], memory: DeviceMemory) -> list[ChunkPlacement]:
        """Choose where the parts of each chunk are between their uses.

        Args:
            sizes: The elements of each chunk, in the order of the model.
            memory: That of the device.

        Returns:
            The placement of each.
        """

    @abstractmethod
    def full_chunk_budget(self, largest: int, memory: DeviceMemory, trace: AccessTrace) -> int:
        """Return how many bytes the temporarily gathered chunks may take together.

        Args:
            largest: The bytes of the largest chunk.
            memory: That of the device.
            trace: What the pass has done, and is going to do.

        Returns:
            Bytes; the chunk in use may take more.
        """

    @property
    def watches_activations(self) -> bool:
        """Whether it wants to know how much non-model data there is."""
        return False


@final
@dataclass(frozen=True)
class StaticPlacement(PlacementPolicy):
    """Keeps fixed fractions of the chunks where the user says.

    Args:
        shard_param_frac: The fraction of the parameters that is sharded; the first chunks, which make up the remaining
            fraction, stay full on every device.
        offload_optim_frac: The fraction whose master weights, gradients and optimizer states are in host memory.
        offload_param_frac: The fraction whose parameters are there as well, between their uses.
        num_ahead: How many chunks are gathered ahead of their use.
        nvme_param_frac: The fraction whose parameters are in files.

    Raises:
        ConfigError: A fraction is not between 0 and 1, or two contradict each other.

    Example:
        >>> import torch
        >>> from colossal.zero.gemini import DeviceMemory, StaticPlacement
        >>> placement = StaticPlacement(offload_optim_frac=0.5)
        >>> chunks = placement.place_chunks([10, 10], DeviceMemory(torch.device("cpu")))
        >>> [chunk.optimizer.name for chunk in chunks]
        ['HOST', 'DEVICE']
    """

    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    num_ahead: int = 0
    nvme_param_frac: float = 0.0

    def __post_init__(self) -> None:
        for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac", "nvme_param_frac"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"{name} is a fraction of the model. Found {getattr(self, name)}. Pass a number from 0 to 1."
                )
        if self.offload_param_frac > self.offload_optim_frac:
            raise ConfigError(
                "Parameters in the memory of the host are updated there. Found offload_param_frac="
                f"{self.offload_param_frac} and offload_optim_frac={self.offload_optim_frac}. Pass an "
                "offload_optim_frac that is at least as large."
            )
        if self.nvme_param_frac > self.offload_param_frac:
            raise ConfigError(
                "Parameters on disk are parameters off the device. Found nvme_param_frac="
                f"{self.nvme_param_frac} and offload_param_frac={self.offload_param_frac}. Pass an offload_param_frac "
                "that is at least as large."
            )
        if self.shard_param_frac < 1 and self.offload_param_frac > 0:
            raise ConfigError(
                "Parameters are offloaded as shards. Found offload_param_frac="
                f"{self.offload_param_frac} with shard_param_frac={self.shard_param_frac}. Leave one of them out."
            )

    def place_chunks(self, sizes: Sequence[int], memory: DeviceMemory) -> list[ChunkPlacement]:  # noqa: ARG002 (fixed by the user)
        """Choose where the parts of each chunk are between their uses.

        Args:
            sizes: The elements of each chunk, in the order of the model.
            memory: That of the device.

        Returns:
            The placement of each.
        """
        placements, total, done = [], sum(sizes), 0
        for size in sizes:
            begins = done / total
            placements.append(
                ChunkPlacement(
                    _tier_of(begins, self.nvme_param_frac, self.offload_param_frac),
                    MemoryTier.HOST if begins < self.offload_optim_frac else MemoryTier.DEVICE,
                    begins < 1 - self.shard_param_frac,
                )
            )
            done += size
        return placements

    def full_chunk_budget(self, largest: int, memory: DeviceMemory, trace: AccessTrace) -> int:  # noqa: ARG002 (fixed by the user)
        """Return how many bytes the temporarily gathered chunks may take together.

        Args:
            largest: The bytes of the largest chunk.
            memory: That of the device.
            trace: What the pass has done, and is going to do.

        Returns:
            Room for the chunk in use, the one before, and those gathered ahead.
        """
        return largest * (2 + self.num_ahead)


@final
@dataclass(frozen=True)
class AutoPlacement(PlacementPolicy):
    """Keeps everything on the host, and chunks on the device as long as they fit next to the non-model data.

    The first pass may use only a fraction of the budget, while it measures the non-model data of each period. From then
    on chunks stay on the device as long as the measured data leaves room, and the one that is needed farthest in the
    future is evicted first. Without a budget everything stays on the device.

    Args:
        warmup_non_model_data_ratio: The fraction of the budget that the first pass keeps free for non-model data.

    Raises:
        ConfigError: The fraction is not between 0 and 1.

    Source: Fang et al., "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management", 2021,
    https://arxiv.org/abs/2108.05818, section 8; Belady, "A study of replacement algorithms for a virtual-storage
    computer", 1966, https://doi.org/10.1147/sj.52.0078.

    Example:
        >>> import torch
        >>> from colossal.zero.gemini import AccessTrace, AutoPlacement, DeviceMemory
        >>> placement, memory = AutoPlacement(), DeviceMemory(torch.device("cpu"), budget=1000)
        >>> placement.full_chunk_budget(largest=100, memory=memory, trace=AccessTrace())  # the first pass
        200
    """

    warmup_non_model_data_ratio: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_non_model_data_ratio <= 1:
            raise ConfigError(
                "warmup_non_model_data_ratio is a fraction of the budget. Found "
                f"{self.warmup_non_model_data_ratio}. Pass a number from 0 to 1; the default is 0.8."
            )

    @property
    def watches_activations(self) -> bool:
        """Whether it wants to know how much non-model data there is."""
        return True

    def place_chunks(self, sizes: Sequence[int], memory: DeviceMemory) -> list[ChunkPlacement]:
        """Choose where the parts of each chunk are between their uses.

        Args:
            sizes: The elements of each chunk, in the order of the model.
            memory: That of the device.

        Returns:
            The placement of each.
        """
        tier = MemoryTier.DEVICE if memory.budget is None else MemoryTier.HOST
        return [ChunkPlacement(tier, tier)] * len(sizes)

    def full_chunk_budget(self, largest: int, memory: DeviceMemory, trace: AccessTrace) -> int:
        """Return how many bytes the temporarily gathered chunks may take together.

        Args:
            largest: The bytes of the largest chunk.
            memory: That of the device.
            trace: What the pass has done, and is going to do.

        Returns:
            What gradients, optimizer states, and the non-model data until the next period leave of the budget.
        """
        if memory.budget is None:
            return largest * 2
        if not trace.is_known:
            return round(memory.budget * (1 - self.warmup_non_model_data_ratio))
        return memory.budget - memory.used["gradients"] - memory.used["optimizer"] - trace.expected_activations()


def _tier_of(place: float, on_disk: float, off_device: float) -> MemoryTier:
    if place < on_disk:
        return MemoryTier.DISK
    return MemoryTier.HOST if place < off_device else MemoryTier.DEVICE
