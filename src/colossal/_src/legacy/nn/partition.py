"""Splitting what a batch consists of, and drawing in a parallel mode."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn

from colossal._src.legacy.context import ParallelMode, seed
from colossal._src.legacy.notice import superseded
from colossal._src.nn.layer import DropPath, split_input


def partition_batch(input_: Any) -> Any:
    """Keep this rank's samples of a batch that all ranks of the tensor-parallel group have.

    Superseded by `colossal.nn.split_input`.

    Args:
        input_: A tensor with samples first, or a mapping or sequence of such tensors.

    Returns:
        The same structure with this rank's samples; in 1D, or without tensor parallelism, all of them.

    Raises:
        ShapeError: A tensor has no dimension to shard.

    Communication: none forward; backward all_gather, the sharding axes, the bytes of the input.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.nn import partition_batch
        >>> from colossal.testing import fake_world
        >>> with fake_world(4, rank=3), ParallelMesh(tp=4, tp_mode="2d"):
        ...     partition_batch({"labels": torch.arange(4)})
        {'labels': tensor([2, 3])}
    """
    superseded("colossal.nn.partition_batch", "colossal.nn.split_input(batch, features=False)")
    if isinstance(input_, torch.Tensor):
        return split_input(input_, features=False)
    if isinstance(input_, Mapping):
        parts: Mapping[Any, Any] = input_
        return {name: partition_batch(each) for name, each in parts.items()}
    if isinstance(input_, list | tuple):
        values: list[Any] | tuple[Any, ...] = input_
        return type(values)(partition_batch(each) for each in values)
    return input_


@final
class WrappedDropout(nn.Module):
    """Dropout that draws from the generator of a parallel mode.

    Superseded by `colossal.nn.Dropout`, which draws different masks where activations are sharded.

    Args:
        p: The probability of zero.
        inplace: Overwrite the input.
        mode: The mode whose generator is used, for example TENSOR, where tensor-parallel ranks draw different values;
            by default the generator in use.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn import WrappedDropout
        >>> WrappedDropout(0.5)(torch.ones(1000)).unique().tolist()
        [0.0, 2.0]
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, mode: ParallelMode | None = None) -> None:
        super().__init__()
        superseded("colossal.nn.WrappedDropout", "colossal.nn.Dropout(p, parallel_input=...)")
        self.p, self.inplace, self.mode = p, inplace, mode
        self._dropout = nn.Dropout(p, inplace)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Drop elements, in training.

        Args:
            inputs: Any shape.

        Returns:
            The same shape.
        """
        return _in_mode(self._dropout, self.mode, inputs)


@final
class WrappedDropPath(nn.Module):
    """`colossal.nn.DropPath` that draws from the generator of a parallel mode.

    Args:
        p: The probability of zero.
        mode: The mode whose generator is used; by default the generator in use.

    Raises:
        ConfigError: `p` is no probability.

    Communication: none: the ranks of a mode draw the same numbers.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn import WrappedDropPath
        >>> WrappedDropPath(0.0)(torch.ones(2)).tolist()
        [1.0, 1.0]
    """

    def __init__(self, p: float = 0.0, mode: ParallelMode | None = None) -> None:
        super().__init__()
        superseded("colossal.nn.WrappedDropPath", "colossal.nn.DropPath(p)")
        self.p, self.mode = p, mode
        self._drop = DropPath(p)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Drop samples, in training.

        Args:
            inputs: Samples first.

        Returns:
            The same shape.
        """
        return _in_mode(self._drop, self.mode, inputs)


def _in_mode(module: nn.Module, mode: ParallelMode | None, inputs: torch.Tensor) -> torch.Tensor:
    if mode is None:
        return module(inputs)
    with seed(mode):
        return module(inputs)
