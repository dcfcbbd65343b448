"""Moves experts between ranks, so that all of these get about as many tokens.

Experts change places in every tensor that has a row for each of them: their own parameters, those of the router, and
the states that an optimizer keeps of both. The model computes what it computed before.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel
from colossal._src.interface import OptimizerWrapper
from colossal._src.nn.moe import ExpertParallel
from colossal._src.tensor import (
    backing_shard,
    copy_placement,
    full_tensor_of,
    grad_of,
    local_regions_of,
    placement_of,
)
from colossal.errors import ConfigError, UnsupportedError

_MATRIX_DIMS = 2


@final
class LoadBalancer:
    """Counts the tokens of the experts of a layer, and exchanges experts between ranks that got many and few.

    After an exchange experts have other numbers: what a router returns, and a checkpoint, has them at their new places.

    Args:
        experts: The experts of this rank, of which each parameter has a row for each.
        gate: The router, or its weight, with a row for each of all experts.
        local_expert_num: How many experts this rank has.
        expert_num: How many there are.
        ep_group: The ranks that have different experts; by default those of the mesh of the experts.
        dp_group: Those that have the same.
        tolerance: By which part the rank with the most tokens may exceed the mean.
        beam_width: How many arrangements the search keeps.
        group_swap_factor: How many experts change places in one call at most, as a part of all pairs of them; at least
            one pair.

    Raises:
        ConfigError: The numbers or the groups are not those of the experts.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import LoadBalancer, MLPExperts
        >>> from colossal.nn.moe import Router
        >>> balancer = LoadBalancer(MLPExperts(4, 8, 16), Router(8, 4, 1), 4, 4, None, None)
        >>> balancer.update_load(torch.tensor([5, 0, 1, 2]))
        >>> balancer.balance_load(None)  # one rank has nothing to exchange
        [0, 1, 2, 3]
    """

    def __init__(
        self,
        experts: nn.Module,
        gate: nn.Module | nn.Parameter,
        local_expert_num: int,
        expert_num: int,
        ep_group: dist.ProcessGroup | None,
        dp_group: dist.ProcessGroup | None,
        tolerance: float = 0.1,
        beam_width: int = 8,
        group_swap_factor: float = 0.4,
    ) -> None:
        self._experts, self._gate, self._num_experts = experts, gate, expert_num
        self._limits = tolerance, beam_width, max(1, int(expert_num * group_swap_factor / 2))
        self._load = torch.zeros(expert_num, dtype=torch.int64, device="cpu")
        mesh = self._mesh
        size = 1 if mesh is None else mesh.size("ep")
        for axis, group in (("ep", ep_group), ("edp", dp_group)):
            ranks = (0,) if mesh is None else mesh.ranks(axis)  # type: ignore[arg-type]
            if group is not None and (given := dist.get_process_group_ranks(group)) != [*ranks]:
                raise ConfigError(
                    f"Experts are exchanged over the ranks {[*ranks]} of their {axis} axis. Found a group of the ranks "
                    f"{given}. Pass mesh.group({axis!r}), or None."
                )
        if mesh is not None and local_expert_num * size != expert_num:
            raise ConfigError(
                f"Each of {size} ranks has as many experts. Found local_expert_num={local_expert_num} and "
                f"expert_num={expert_num}. Pass num_experts of the experts, and the number of all of them."
            )

    @property
    def _mesh(self) -> ParallelMesh | None:
        """The mesh over which experts are sharded; None for those that each rank has in full, or some features of."""
        own: Any = self._experts
        is_sharded = isinstance(own, ExpertParallel) and all(each.dims[0] for each in own.layouts.values())
        return own.mesh if is_sharded else None

    def update_load(self, load: torch.Tensor) -> None:
        """Count tokens; not while activation checkpointing computes a layer again.

        Args:
            load: How many tokens of this rank each of all experts got, of shape (E,).
        """
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 (no public function says whether this is backward)
            self._load = self._load.to(load.device) + load.detach()

    def balance_load(self, optim: OptimizerWrapper | torch.optim.Optimizer | None) -> list[int]:
        """Exchange experts between ranks by what was counted since the last call, between two steps.

        Args:
            optim: The optimizer of the model, boosted or not; None without one.

        Returns:
            For each place the former place of the expert that is there now.

        Raises:
            ConfigError: There are gradients, which `optim.zero_grad()` discards.
            UnsupportedError: The optimizer keeps states whose rows are unknown.

        Communication: all_reduce, ep and edp, 8 bytes for each expert. If experts move: of the tensors that have a row
        for each expert, all_reduce over the ranks that shard them, and what the optimizer sends after a step.
        """
        order = self.plan()
        exchange_experts([(self, order)], optim)
        return order

    def plan(self) -> list[int]:
        """Find an arrangement, and begin to count anew.

        Returns:
            For each place the place that its expert has now.

        Communication: all_reduce, ep and edp, 8 bytes for each expert.
        """
        mesh, load = self._mesh, self._load
        self._load = torch.zeros_like(load)
        if mesh is None:
            return list(range(self._num_experts))
        for axis in ("ep", "edp"):
            load = Channel(axis, mesh).all_reduce(load)
        tolerance, beam_width, num_swaps = self._limits
        return find_arrangement(load.tolist(), mesh.size("ep"), tolerance, beam_width, num_swaps)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters and buffers that have a row for each expert.

        Yields:
            Those of the experts, then those of the router.
        """
        yield from self._experts.parameters()
        if isinstance(self._gate, nn.Parameter):
            yield self._gate
            return
        for each in (*self._gate.parameters(), *self._gate.buffers()):
            if placement_of(backing_shard(each)).shape[:1] == (self._num_experts,):
                yield each


def apply_load_balance(model: nn.Module, optim: OptimizerWrapper | torch.optim.Optimizer | None) -> None:
    """Exchange experts between ranks in all layers that count tokens: `SparseMLP(..., enable_load_balance=True)`.

    Args:
        model: The model, boosted or not.
        optim: Its optimizer.

    Raises:
        ConfigError: There are gradients, which `optim.zero_grad()` discards.

    Communication: as of `LoadBalancer.balance_load`, for each layer.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import SparseMLP, apply_load_balance
        >>> layer = SparseMLP(4, hidden_size=8, intermediate_size=16, router_loss=False, enable_load_balance=True)
        >>> layer(torch.randn(2, 8)).sum().backward()
        >>> layer.zero_grad()
        >>> apply_load_balance(layer, None)
        >>> layer.load_balancer is None
        False
    """
    found = [getattr(module, "load_balancer", None) for module in model.modules()]
    balancers = [each for each in found if isinstance(each, LoadBalancer)]
    exchange_experts([(each, each.plan()) for each in balancers], optim)


def find_arrangement(
    load: Sequence[int], num_ranks: int, tolerance: float, beam_width: int, num_swaps: int
) -> list[int]:
    """Search exchanges of two experts after which the rank with the most tokens has the fewest, by beam search.

    Args:
        load: The tokens of each expert.
        num_ranks: The ranks, each of which has as many experts, the first ones first.
        tolerance: By which part that rank may exceed the mean.
        beam_width: How many arrangements are kept.
        num_swaps: How many exchanges there are at most.

    Returns:
        For each place the expert that is there then; with the fewest exchanges that do as well.
    """
    per_rank = len(load) // num_ranks

    def loads_of(order: tuple[int, ...]) -> list[int]:
        return [sum(load[each] for each in order[at : at + per_rank]) for at in range(0, len(order), per_rank)]

    def cost(order: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
        return sorted(loads_of(order), reverse=True), order

    best: tuple[int, ...] = tuple(range(len(load)))
    beam, limit = [best], (1 + tolerance) * sum(load) / num_ranks
    for _ in range(num_swaps):
        if max(loads_of(best)) <= limit:
            break
        swapped = {each for order in beam for each in _exchanges(order, load, loads_of(order), per_rank)}
        beam = sorted(swapped, key=cost)[:beam_width]
        if not beam or cost(beam[0])[0] >= cost(best)[0]:
            break
        best = beam[0]
    return list(best)


def _exchanges(
    order: tuple[int, ...], load: Sequence[int], of_ranks: list[int], per_rank: int
) -> Iterator[tuple[int, ...]]:
    """Exchange an expert of the rank with the most tokens for one of another rank that gets fewer."""
    busiest = of_ranks.index(max(of_ranks))
    own = range(busiest * per_rank, (busiest + 1) * per_rank)
    for here in own:
        for there in range(len(order)):
            if there not in own and load[order[there]] < load[order[here]]:
                new = list(order)
                new[here], new[there] = order[there], order[here]
                yield tuple(new)


@torch.no_grad()
def exchange_experts(
    arrangements: Iterable[tuple[LoadBalancer, list[int]]], optim: OptimizerWrapper | torch.optim.Optimizer | None
) -> None:
    """Move rows of parameters, of the copies that an optimizer has of them, and of its states.

    Raises:
        ConfigError: There are gradients.
        UnsupportedError: The optimizer keeps states whose rows are unknown.
    """
    moves = [
        (order, tensor) for balancer, order in arrangements if order != sorted(order) for tensor in balancer.tensors()
    ]
    if not moves:
        return
    masters = optim.masters if isinstance(optim, OptimizerWrapper) else None
    copies = {} if masters is None else {working: copy for copy, working in masters.pairs.items()}
    plain: Any = optim.unwrap() if isinstance(optim, OptimizerWrapper) else optim
    if any(grad_of(each) is not None or (masters is not None and masters.holds_grad(each)) for _, each in moves):  # type: ignore[arg-type]
        raise ConfigError(
            "Experts change places between two steps, when there are no gradients. Found some. Call "
            "optimizer.zero_grad() first."
        )
    rows: list[tuple[list[int], torch.Tensor]] = []  # found before any of them moves, as there may be an error
    for order, tensor in moves:
        held: torch.Tensor = copies.get(tensor, backing_shard(tensor))  # type: ignore[call-overload]
        rows += [(order, each) for each in (held, *_states_of(held, plain))]
    for order, each in rows:
        _move_rows(each, order)
    if masters is not None:
        masters.copy_params_from_masters()


def _states_of(parameter: torch.Tensor, optim: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """Yield the states of a parameter that have a row for each expert."""
    shape = placement_of(parameter).shape
    for key, value in ({} if optim is None else optim.state.get(parameter, {})).items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.shape == parameter.shape:  # also without elements, as other ranks may have some
            yield copy_placement(value, parameter)
        elif value.numel() <= 1:
            continue  # such as the number of steps
        elif key.endswith("_col") and len(shape) == _MATRIX_DIMS:
            continue  # a factored moment with a value for each column
        elif key.endswith(("_row", "_col")) and value.shape[:1] == shape[:1]:
            yield value
        else:
            raise UnsupportedError(
                "States of optimizers move with their experts if they have the shape of a parameter, or are factored. "
                f"Found {key!r} of the shape {tuple(value.shape)} for a parameter of {tuple(shape)}. Train with an "
                "optimizer such as HybridAdam, or without exchanging experts."
            )


def _move_rows(tensor: torch.Tensor, order: list[int]) -> None:
    """Write to each place the row that another one has."""
    moved = full_tensor_of(tensor).detach()[order]
    rank = dist.get_rank() if dist.is_initialized() else 0
    for region, part in local_regions_of(tensor, rank):
        part.copy_(moved[region.slices])
