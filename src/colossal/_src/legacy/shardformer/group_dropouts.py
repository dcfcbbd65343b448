"""Dropout of activations of a process group, by the documented names of `colossal.shardformer.layer`."""

from typing import Any, Self, final

import torch

from colossal._src.legacy.shardformer.group_layer import Group, mesh_of
from colossal._src.nn.layer import Dropout
from colossal.errors import ConfigError


class _GroupDropout(Dropout):
    """Dropout on a process group."""

    def __init__(
        self, p: float = 0.5, inplace: bool = False, process_group: Group = None, *, parallel_input: bool
    ) -> None:
        super().__init__(p, inplace, parallel_input=parallel_input, mesh=mesh_of(process_group))

    @classmethod
    def from_native_module(cls, module: torch.nn.Module, process_group: Group = None) -> Self:
        """Take the probability of a serial module.

        Args:
            module: A `torch.nn.Dropout`.
            process_group: The ranks; by default those of the tp axis of the ambient mesh, or all.

        Returns:
            The layer.

        Raises:
            ConfigError: The module is another one.
        """
        if not isinstance(module, torch.nn.Dropout):
            raise ConfigError(
                f"This layer is made from torch.nn.Dropout. Found {type(module).__name__}. Pass such a module."
            )
        layer: Any = cls
        return layer(module.p, module.inplace, process_group).train(module.training)


@final
class DropoutForParallelInput(_GroupDropout):
    """`colossal.nn.Dropout` of activations that are sharded over a process group: each rank draws a mask of its own.

    Args:
        p: The probability of zero.
        inplace: Overwrite the input.
        process_group: The ranks; by default those of the tp axis of the ambient mesh, or all.

    Raises:
        ConfigError: `p` is no probability.

    Communication: when it is built, broadcast, the group, the state of the random numbers.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import DropoutForParallelInput
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     DropoutForParallelInput.from_native_module(torch.nn.Dropout(0.2), process_group=None).p
        0.2
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, process_group: Group = None) -> None:
        super().__init__(p, inplace, process_group, parallel_input=True)


@final
class DropoutForReplicatedInput(_GroupDropout):
    """`colossal.nn.Dropout` of activations that all ranks of a process group have: they draw the same mask.

    Args:
        p: The probability of zero.
        inplace: Overwrite the input.
        process_group: The ranks; by default those of the tp axis of the ambient mesh, or all.

    Raises:
        ConfigError: `p` is no probability.

    Communication: when it is built, broadcast, the group, the state of the random numbers.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import DropoutForReplicatedInput
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     DropoutForReplicatedInput.from_native_module(torch.nn.Dropout(0.2), process_group=None).p
        0.2
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, process_group: Group = None) -> None:
        super().__init__(p, inplace, process_group, parallel_input=False)
