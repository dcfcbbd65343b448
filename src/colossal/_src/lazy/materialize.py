"""From recipes to values, in place."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from colossal._src.lazy.tensor import LazyTensor
from colossal.logging import get_dist_logger


def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
    """Give a module values, in place: each tensor stays the object that it is, for optimizers and tied modules.

    Args:
        module: Built inside of `LazyInitContext`, or in part.
        verbose: Log how many tensors were made, and their bytes.

    Returns:
        The module itself.

    Example:
        >>> import torch
        >>> from colossal.lazy import LazyInitContext, materialize
        >>> with LazyInitContext():
        ...     model = torch.nn.LayerNorm(2)
        >>> materialize(model).weight
        Parameter containing:
        tensor([1., 1.], requires_grad=True)
    """
    lazy = list({id(each): each for each in lazy_tensors(module)}.values())
    recurrent = [
        each for each in module.modules() if isinstance(each, nn.RNNBase) and next(lazy_tensors(each), None) is not None
    ]
    for each in recurrent:
        each._flat_weight_refs = []  # noqa: SLF001 (weak references, with which torch does not swap tensors)  # pyright: ignore[reportPrivateUsage]
    for each in lazy:
        each.materialize()
    for each in recurrent:
        each._init_flat_weights()  # noqa: SLF001 (torch's own way to make them again)  # pyright: ignore[reportPrivateUsage]
    if verbose:
        num_bytes = sum(each.nbytes for each in lazy)
        get_dist_logger().info(f"materialized {len(lazy)} tensors of {num_bytes} bytes")
    return module


def lazy_tensors(module: nn.Module) -> Iterator[LazyTensor]:
    """Find the lazy tensors of a module and of those in it: parameters, buffers and plain attributes.

    Args:
        module: Any module.

    Yields:
        Each at least once.

    Example:
        >>> import torch
        >>> from colossal.lazy import LazyInitContext, lazy_tensors
        >>> with LazyInitContext():
        ...     model = torch.nn.Linear(2, 3)
        >>> [tuple(each.shape) for each in lazy_tensors(model)]
        [(3, 2), (3,)]
    """
    for each in module.modules():
        held: list[Any] = [value for name, value in vars(each).items() if name != "_modules"]
        yield from (leaf for leaf in tree_leaves(held) if isinstance(leaf, LazyTensor))
