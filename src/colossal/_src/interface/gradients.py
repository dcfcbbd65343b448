"""Norms and limits of gradients that may be sharded: each rank processes its shards, and sums are reduced."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import distributed as dist
from torch.nn.utils import get_total_norm

from colossal._src.comm import all_reduce_over
from colossal._src.interface.full_spec import Peers
from colossal._src.tensor import comm_device, grad_of, local_of, placement_of
from colossal.errors import UnsupportedError

Groups = tuple[dist.ProcessGroup, ...]


def total_norm(parameters: Iterable[torch.Tensor], norm_type: float, peers: Peers | None = None) -> torch.Tensor:
    """Measure the norm of the gradients of all parameters together, as if they were one vector.

    Each element counts once: on all ranks that hold it if it is replicated, and on one stage of a pipeline if several
    have a copy of it. What is sharded over which groups is for the placements of the parameters to say.

    Communication: all_reduce, each axis that shards a gradient, 8 bytes for each way of sharding; with `peers`, their
    axis, 8 bytes.
    """
    by_groups: dict[Groups, list[torch.Tensor]] = {}
    for parameter in parameters:
        placement = placement_of(parameter)
        if placement.is_counted:
            by_groups.setdefault(placement.shard_groups, []).append(parameter)
    groups = dict.fromkeys(group for each in by_groups for group in each)
    if not groups and peers is None:
        return get_total_norm(_local_grads(by_groups.get((), [])), norm_type)
    if not norm_type > 0:
        raise UnsupportedError(
            f"The norm of sharded gradients needs a norm_type greater than 0. Found norm_type={norm_type}. "
            "Pass 1.0, 2.0 or float('inf')."
        )
    is_largest = math.isinf(norm_type)
    op = "max" if is_largest else "sum"
    everything = [parameter for same in by_groups.values() for parameter in same]
    device = _reduction_device(everything) if peers is None else peers.device
    norms = [_local_norm(same, norm_type).to(device) for same in by_groups.values()]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    # a rank without gradients takes part with a zero
    terms = [norm if is_largest else norm**norm_type for norm in norms] or [zero]
    for group in groups:
        chosen = [number for number, each in enumerate(by_groups) if group in each]
        reduced = all_reduce_over(torch.stack([terms[number] for number in chosen]), [group], op)
        for number, term in zip(chosen, reduced.unbind(), strict=True):
            terms[number] = term
    total = torch.stack(terms).max() if is_largest else torch.stack(terms).sum()
    if peers is not None:
        total = all_reduce_over(total, peers.groups, op)
    norm = total if is_largest else total ** (1 / norm_type)
    return norm if any(each.dtype == torch.float64 for each in everything) else norm.to(torch.float32)


def scale(grads: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by one factor, in place."""
    for device, shards in _by_device(grads).items():
        torch._foreach_mul_(shards, factor.to(device))


def clamp(grads: Iterable[torch.Tensor], limit: float) -> None:
    """Limit every element of gradients to ``[-limit, limit]``, in place."""
    for shards in _by_device(grads).values():
        torch._foreach_clamp_min_(shards, -limit)
        torch._foreach_clamp_max_(shards, limit)


def _reduction_device(parameters: Sequence[torch.Tensor]) -> torch.device:
    """The device of the groups; the host if all gradients are there, as no device then has to be waited for."""
    if all(parameter.is_cpu for parameter in parameters):
        return torch.device("cpu")
    return comm_device(next(each for each in parameters if placement_of(each).shard_groups))


def _local_norm(parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of what this rank has of some gradients, in float64: powers of a norm need room."""
    local = [grad for grad in _local_grads(parameters) if grad.numel()]
    return get_total_norm(local, norm_type).to(torch.float64)


def _local_grads(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [local_of(grad) for grad in map(grad_of, parameters) if grad is not None]


def _by_device(grads: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    found: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        shard = local_of(grad)
        found.setdefault(shard.device, []).append(shard)
    return found
