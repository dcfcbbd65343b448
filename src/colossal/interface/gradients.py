"""Norms and limits of gradients that may be sharded: each rank works on its own part, and sums are added up."""

import math
from collections.abc import Iterable

import torch
from torch import distributed as dist
from torch.nn.utils import get_total_norm

from colossal.comm import all_reduce_over
from colossal.errors import UnsupportedError
from colossal.tensor import local_of, meeting_device, shard_groups


def total_norm(parameters: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Measure the norm of the gradients of all parameters together, as if they were one vector.

    Each element counts once, whether it lies on one rank or, as part of a whole tensor, on all.

    Args:
        parameters: With a gradient each, which is sharded as its parameter is; the same ones on all ranks.
        norm_type: The p of the p-norm; ``float("inf")`` for the largest magnitude.

    Returns:
        The norm; a scalar, the same on all ranks.

    Raises:
        UnsupportedError: A gradient is sharded, and `norm_type` is not greater than 0.

    Communication: all_reduce, the axes that shard a gradient, 8 bytes each.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_groups.setdefault(shard_groups(parameter), []).append(parameter)
    if by_groups.keys() <= {()}:
        return get_total_norm(_local_grads(by_groups.get((), [])), norm_type)
    if not norm_type > 0:
        raise UnsupportedError(
            f"The norm of sharded gradients needs a norm_type greater than 0. Found norm_type={norm_type}. "
            "Pass 1.0, 2.0 or float('inf')."
        )
    norms = torch.stack([_norm_over(groups, same, norm_type) for groups, same in by_groups.items()])
    double = any(parameter.dtype == torch.float64 for same in by_groups.values() for parameter in same)
    return torch.linalg.vector_norm(norms, norm_type).to(torch.float64 if double else torch.float32)


def scale(grads: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by one factor, in place.

    Args:
        grads: Whole tensors and DTensors.
        factor: A scalar, the same on all ranks.
    """
    for device, parts in _by_device(grads).items():
        torch._foreach_mul_(parts, factor.to(device))


def clamp(grads: Iterable[torch.Tensor], limit: float) -> None:
    """Limit every element of gradients to ``[-limit, limit]``, in place.

    Args:
        grads: Whole tensors and DTensors.
        limit: The largest magnitude that is left.
    """
    for parts in _by_device(grads).values():
        torch._foreach_clamp_min_(parts, -limit)
        torch._foreach_clamp_max_(parts, limit)


def _norm_over(groups: tuple[dist.ProcessGroup, ...], parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The common norm of gradients that the same groups shard, in float64: powers of a norm need room."""
    local = [grad for grad in _local_grads(parameters) if grad.numel()]
    own = get_total_norm(local, norm_type).to(meeting_device(parameters[0]), torch.float64)
    if not groups:
        return own
    if math.isinf(norm_type):
        return all_reduce_over(own, groups, "max")
    return all_reduce_over(own**norm_type, groups) ** (1 / norm_type)


def _local_grads(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _by_device(grads: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    found: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        part = local_of(grad)
        found.setdefault(part.device, []).append(part)
    return found
