"""Where the elements of a parameter that are on this rank lie in the whole one."""

from dataclasses import dataclass
from math import prod
from typing import Any, Self, final

import torch
from torch import distributed as dist

from colossal.errors import UnsupportedError
from colossal.tensor import (
    Region,
    flat_shard_of,
    layout_of,
    local_of,
    meeting_device,
    shard_groups,
    tensor_part_of,
    views_of,
    whole_shape,
)

Groups = tuple[dist.ProcessGroup, ...]


@final
@dataclass(frozen=True)
class Cut:
    """The boxes of a whole parameter that one rank holds.

    Args:
        shape: The shape of the whole parameter.
        regions: The boxes, in the order of the elements.
        groups: The groups of ranks over which sums of all elements are added up.
        device: Where these communicate, if the elements may be offloaded elsewhere.
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    groups: Groups = ()
    device: torch.device | None = None

    @classmethod
    def of(cls, param: torch.Tensor) -> Self:
        """Read it from a parameter.

        Args:
            param: Whole, a DTensor, or a range that `colossal.tensor.mark_shard` knows.

        Returns:
            Where its elements are.

        Raises:
            UnsupportedError: The gradient of a DTensor lies otherwise than the parameter, or tensor parallelism
                divides it.
        """
        if tensor_part_of(param) is not None:
            raise UnsupportedError(
                "Sums over a whole parameter are known for ZeRO's shards and for DTensors. Found a shard of a "
                f"tensor-parallel layer, of shape {tuple(param.shape)}. Take an optimizer that works by element, such "
                "as torch.optim.AdamW or colossal.nn.optimizer.HybridAdam, or a mesh without tp."
            )
        shard = flat_shard_of(param)
        if shard is not None:
            return cls(shard.layout.shape, shard.regions, shard.groups, meeting_device(param))
        if not is_sharded(param):
            return cls(tuple(param.shape), (Region.whole(param.shape),))
        if param.grad is not None and layout_of(param.grad) != layout_of(param):
            raise UnsupportedError(
                f"The gradient of a DTensor lies as the parameter does. Found {layout_of(param.grad)} for "
                f"{layout_of(param)}. Redistribute it before the step."
            )
        regions = layout_of(param).regions_of(dist.get_rank())
        return cls(tuple(whole_shape(param)), regions, shard_groups(param), meeting_device(param))

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows and columns, which are its last two dimensions."""
        return len(self.shape) > 1

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Leave out what only pads a tensor.

        Args:
            tensor: A parameter, or its gradient.

        Returns:
            The elements of the boxes, which share memory with it.
        """
        local = local_of(tensor.detach())
        length = sum(region.numel for region in self.regions)
        return local if local.numel() == length else local.reshape(-1)[:length]

    def boxes(self, local: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
        """Look at local elements as boxes.

        Args:
            local: What `own` returned, or any tensor like it.

        Returns:
            Each box, and its elements in its shape, which share memory with `local`.
        """
        if len(self.regions) == 1 and self.regions[0].shape == local.shape:
            return [(self.regions[0], local)]  # also where it has gaps
        return views_of(local, self.regions)


def is_sharded(param: torch.Tensor) -> bool:
    """Tell a DTensor from other tensors.

    Args:
        param: A parameter.

    Returns:
        Whether it is a DTensor.
    """
    mesh: Any = getattr(param, "device_mesh", None)
    return mesh is not None
