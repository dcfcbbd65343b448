"""Give each rank some experts of a layer."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import end_graphs_in
from colossal._src.nn.layer.tp import make_param_shard
from colossal._src.nn.moe.dispatch import EXPERTS, combine, dispatch, num_experts_of_rank
from colossal._src.nn.moe.gathered import add_results, gather_tokens
from colossal._src.nn.moe.grouped_forward import forward_grouped
from colossal._src.tensor import Layout
from colossal.errors import ConfigError, PlanError

Exchange = Literal["all_to_all", "all_gather"]
"""How tokens come to their experts."""

end_graphs_in("colossal._src.nn.moe")  # how many rows arrive differs from step to step


class ExpertParallel(nn.Module):
    """What experts are in addition to their own class, once `shard_experts` has given each rank some of them."""

    num_experts: int  # of this rank, as the forward method of the class needs it
    layouts: dict[str, Layout]  # of the parameters
    mesh: ParallelMesh
    exchange: Exchange  # how tokens come to their experts
    _are_tokens_sharded = False

    def use_sharded_tokens(self) -> None:
        """Take tokens for those of this rank only; otherwise the ranks of tp have the same, and dispatch a part each.

        Modes of sequence parallelism that shard tokens over tp call this.
        """
        self._are_tokens_sharded = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        meanwhile: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Send tokens to their experts, and return the weighted sums of what these make of them.

        Args:
            hidden_states: Of shape (T, D).
            chosen: The experts of each token, of shape (T, K).
            weights: Their weights, of shape (T, K).
            meanwhile: Called while tokens are on their way, as of `dispatch`.

        Returns:
            The results, of shape (T, D).
        """
        mesh, length = self.mesh, len(hidden_states)
        divides = mesh.size("tp") > 1 and not self._are_tokens_sharded
        if divides:
            hidden_states, chosen, weights = (
                comm.scatter(each, "tp", 0, mesh, uneven=True) for each in (hidden_states, chosen, weights)
            )
        num_experts = self.num_experts * mesh.size(EXPERTS)
        if self.exchange == "all_gather":
            gathered = gather_tokens(hidden_states, chosen, weights, num_experts, mesh)
            if meanwhile is not None:
                meanwhile()
            result = add_results(forward_grouped(self, super().forward, gathered.rows, gathered.ends), gathered)
        else:
            arrived = dispatch(hidden_states, chosen, num_experts, mesh, meanwhile)
            ends = torch.tensor(arrived.counts, device="cpu").cumsum(0)
            result = combine(forward_grouped(self, super().forward, arrived.rows, ends), weights, arrived)
        return comm.gather(result, "tp", 0, mesh, length=length) if divides else result


def shard_experts(experts: nn.Module, mesh: ParallelMesh, exchange: Exchange | None = None) -> nn.Module:
    """Give each rank of the ep axis some of the experts of a layer, in place.

    Its parameters keep their names, and files have the parameters of all experts, in their order. Gradients of an
    expert are those of the tokens of all ranks; boost averages them over the ranks that have the same experts.

    Args:
        experts: Experts as Hugging Face has them: `num_experts` says how many there are, the parameters have one row
            for each, and the forward method takes hidden states of shape (T, D), the experts of each token of shape
            (T, K), and their weights of shape (T, K). A method ``forward_grouped(rows, ends)``, if they have one, is
            called instead: with rows that are sorted by expert, and where those of each expert of this rank end, a
            tensor of integers in host memory.
        mesh: The mesh. Ranks of tp are assumed to have the same tokens, of which each dispatches a part.
        exchange: ``all_to_all`` sends a token to the ranks of its experts, once for each of these. ``all_gather`` sends
            it to all ranks, and adds up their results: fewer bytes if a token goes to more experts than there are
            ranks, whatever experts are chosen. By default what the `MixtureOfExperts` around them was given, or
            ``all_to_all``.

    Returns:
        The module, whose class is derived from `ExpertParallel` too; unchanged where the ep axis has one rank, or
        this was done before.

    Raises:
        PlanError: The experts are not stored so, or the size of the ep axis does not divide their number.
        ConfigError: `exchange` is something else.

    Communication: none; a forward pass as of `dispatch` and `combine`, or, with T tokens on each of R ranks, all_gather
    and reduce_scatter, ep, R T D elements each, and backward the same.

    Example:
        >>> from transformers import MixtralConfig
        >>> from transformers.models.mixtral.modeling_mixtral import MixtralExperts
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn.moe import shard_experts
        >>> from colossal.testing import fake_world
        >>> experts = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=4))
        >>> with fake_world(2):
        ...     sharded = shard_experts(experts, ParallelMesh(ep=2))
        >>> sharded.gate_up_proj.shape, sharded.num_experts
        (torch.Size([2, 32, 8]), 2)
    """
    check_exchange(exchange)
    if mesh.size(EXPERTS) == 1 or isinstance(experts, ExpertParallel):
        return experts
    layer: Any = experts
    number = getattr(experts, "num_experts", None)
    parameters = dict(experts.named_parameters())
    odd = [name for name, each in parameters.items() if "." in name or each.shape[:1] != (number,)]
    if not isinstance(number, int) or not parameters or odd:
        raise PlanError(
            "Experts that are sharded over ranks say their number in num_experts, and each of their parameters has a "
            f"row for each expert. Found {type(experts).__name__} with num_experts={number!r} and "
            f"{', '.join(f'{name} {tuple(parameters[name].shape)}' for name in odd) or 'no such parameter'}. Store "
            "the weights of all experts in one parameter each, or use ep=1."
        )
    layer.num_experts = num_experts_of_rank(number, mesh)
    layer.exchange = exchange or getattr(experts, "exchange", "all_to_all")
    layouts: dict[str, Layout] = {}
    for name, parameter in parameters.items():
        dims = "S0" + "R" * (parameter.dim() - 1)
        layouts[name] = Layout.parse(dims, tuple(parameter.shape), mesh=mesh, axes=[EXPERTS])
    keep_shards(experts, layouts, mesh, _sharded_class(type(experts)))
    return layer


def keep_shards(
    experts: nn.Module, layouts: dict[str, Layout], mesh: ParallelMesh, sharded_class: type[nn.Module]
) -> None:
    """Keep what this rank has of parameters, and take the class whose forward method knows it."""
    for name, layout in layouts.items():
        setattr(experts, name, make_param_shard(experts.get_parameter(name), layout, mesh))
    layer: Any = experts
    layer.layouts, layer.mesh, layer.__class__ = layouts, mesh, sharded_class


def check_exchange(exchange: str | None) -> None:
    """Reject what is no way for tokens to come to experts."""
    if exchange not in (None, *get_args(Exchange)):
        raise ConfigError(
            f"Tokens come to experts by one of {', '.join(get_args(Exchange))}. Found {exchange!r}. Pass one of these."
        )


@cache
def _sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"ExpertParallel{kind.__name__}", (ExpertParallel, kind), {})
