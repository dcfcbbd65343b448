"""How one module is sharded over the tp axis.

==============================  ====================================================================================
style                           what becomes of the module
==============================  ====================================================================================
colwise                         a linear layer whose output features are sharded; ``packed_colwise(3)`` if three
                                projections are packed into it
colwise_gather_output           colwise, whose output is gathered
colwise_no_reduce               colwise, of an input whose gradient is all-reduced elsewhere
colwise_multi_query             a linear layer into queries, as many as it has inputs, then one key and one value for
                                all heads: key and value are gathered
rowwise                         a linear layer that takes a shard of the input features, and all-reduces its output
rowwise_split_input             rowwise, that takes the full input
colwise_kv                      colwise; where there are fewer heads than ranks, several ranks compute the same head
vocab                           an embedding whose rows are sharded
lm_head                         the linear layer into the vocabulary, sharded over its entries, for a parallel loss
embedding_colwise               an embedding with a column for each head, sharded over the heads
replicate                       a replicated layer, whose output each rank uses for its own heads: the gradient of the
                                output is all-reduced
replicated_with_grad_allreduce  replicated parameters that each rank uses for its own heads: their gradients are
                                all-reduced
split_input                     a module that reads the number of features off its input: the input is split, and the
                                colwise layers in it gather it
moe_tp_experts                  experts whose linear layers are one tensor each: sharded over the ep axis, if it has
                                several ranks, and else over tp by their inner features
ep_experts                      experts that are sharded over the ep axis only
==============================  ====================================================================================
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.nn.layer import Linear1D_Col, Linear1D_Row, VocabParallelEmbedding
from colossal._src.nn.layer.tp import local_length, make_layout, make_param_shard
from colossal._src.nn.moe import Exchange, shard_experts
from colossal._src.shardformer.conv1d import Conv1DCol, Conv1DRow
from colossal._src.shardformer.head_layers import HeadParallelEmbedding, ReplicatedKVLinear, sum_gradient
from colossal.errors import PlanError


@final
@dataclass(frozen=True)
class StyleContext:
    """What a style needs to know in addition to the module.

    Args:
        mesh: The mesh, over whose tp axis modules are sharded.
        num_key_value_heads: How many heads keys and values have in the full model; None for as many as queries.
        gather_logits: Whether logits are gathered.
        expert_exchange: How tokens come to experts, as of `colossal.nn.moe.shard_experts`.

    Example:
        >>> from torch import nn
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.shardformer import STYLES, StyleContext
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     STYLES["colwise"](nn.Linear(4, 6), StyleContext(ParallelMesh(tp=2))).weight.shape
        torch.Size([3, 4])
    """

    mesh: ParallelMesh
    num_key_value_heads: int | None = None
    gather_logits: bool = True
    expert_exchange: Exchange | None = None


Style = Callable[[nn.Module, StyleContext], nn.Module]


def _column(module: nn.Module, context: StyleContext, num_projections: int = 1, **options: Any) -> nn.Module:
    if isinstance(module, nn.Linear):
        return Linear1D_Col.from_native(
            module, context.mesh, split_sizes=_packed_sizes(module.out_features, num_projections), **options
        )
    conv: Any = module
    return Conv1DCol.from_native(conv, context.mesh, split_sizes=_packed_sizes(conv.nf, num_projections))


def _column_without_reduce(module: nn.Module, context: StyleContext) -> nn.Module:
    layer: Any = _column(module, context)
    # The default would all-reduce the gradient a second time.
    layer.product.set_input_transform(_identity)
    return layer


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _multi_query(module: nn.Module, context: StyleContext) -> nn.Module:
    """Shard queries, and key and value, each by itself, and gather the latter, as all heads use them."""
    assert isinstance(module, nn.Linear)
    mesh, queries, total = context.mesh, module.in_features, module.out_features
    layer = Linear1D_Col.from_native(module, mesh, split_sizes=[queries, total - queries])
    own = local_length(queries, ("tp",), mesh)

    def gather(_layer: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        shared = comm.gather(output[..., own:], "tp", -1, mesh, partial_grad=True, length=total - queries)
        return torch.cat([output[..., :own], shared], -1)

    layer.register_forward_hook(gather)
    return layer


def _packed_sizes(features: int, number: int) -> list[int] | None:
    return [features // number] * number if number > 1 else None


def _row(module: nn.Module, context: StyleContext, **options: Any) -> nn.Module:
    kind: Any = Linear1D_Row if isinstance(module, nn.Linear) else Conv1DRow
    return kind.from_native(module, context.mesh, **options)


def _key_value(module: nn.Module, context: StyleContext) -> nn.Module:
    heads = context.num_key_value_heads
    if heads is None or heads >= context.mesh.size("tp"):
        return _column(module, context)
    return ReplicatedKVLinear(module, heads, context.mesh)


def _vocabulary(module: nn.Module, context: StyleContext) -> nn.Module:
    return VocabParallelEmbedding.from_native(module, context.mesh)


def _head(module: nn.Module, context: StyleContext) -> nn.Module:
    return _column(module, context, gather_output=context.gather_logits)


def _head_embedding(module: nn.Module, context: StyleContext) -> nn.Module:
    return HeadParallelEmbedding.from_native(module, context.mesh)


def _replicate(module: nn.Module, context: StyleContext) -> nn.Module:
    def leave(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return comm.replicate(output, "tp", context.mesh)

    module.register_forward_hook(leave)
    return module


def _split_input(module: nn.Module, context: StyleContext) -> nn.Module:
    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (comm.scatter(args[0], "tp", -1, context.mesh), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": comm.scatter(kwargs["hidden_states"], "tp", -1, context.mesh)}

    module.register_forward_pre_hook(enter, with_kwargs=True)
    return module


def _replicated_with_grad_allreduce(module: nn.Module, context: StyleContext) -> nn.Module:
    for parameter in (each for each in module.parameters(recurse=False) if each.requires_grad):
        sum_gradient(parameter, context.mesh)
    return module


@final
class ExpertTokens:
    """Hooks for inputs and outputs of sharded experts: all tokens, or the local ones with sequence parallelism."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh, self._are_sharded = mesh, False

    def gather_and_scatter(self) -> None:
        """Gather tokens, which are sharded over ranks, before the experts, and scatter them again after."""
        self._are_sharded = True

    def enter(self, _experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The forward pre-hook of the experts."""
        hidden, chosen, weights = args
        mesh = self._mesh
        if not self._are_sharded:
            # Each rank computes some inner features of every expert, so gradients of both are partial sums.
            return comm.replicate(hidden, "tp", mesh), chosen, comm.replicate(weights, "tp", mesh)
        hidden, weights = (comm.gather(each, "tp", 0, mesh, partial_grad=True) for each in (hidden, weights))
        return hidden, comm.gather(chosen, "tp", 0, mesh), weights

    def leave(self, _experts: nn.Module, _args: Any, output: Any) -> Any:
        """The forward hook of the experts."""
        return (
            comm.reduce_scatter(output, "tp", 0, self._mesh)
            if self._are_sharded
            else comm.reduce(output, "tp", self._mesh)
        )


def _experts(module: nn.Module, context: StyleContext) -> nn.Module:
    mesh, experts = context.mesh, module
    if mesh.size("ep") > 1:
        return shard_experts(experts, mesh, context.expert_exchange)
    _check_features(experts)
    up, down = experts.get_parameter("gate_up_proj"), experts.get_parameter("down_proj")
    of_up, of_down = (2, 1) if getattr(experts, "is_transposed", False) else (1, 2)
    inner = up.shape[of_up] // 2
    layouts = {
        # Gate and up projection are sharded each by itself, so that a rank has the same features of both.
        "gate_up_proj": make_layout(mesh, tuple(up.shape), {of_up: ("tp",)}, {of_up: (inner, inner)}),
        "down_proj": make_layout(mesh, tuple(down.shape), {of_down: ("tp",)}),
    }
    for name, parameter in (("gate_up_proj", up), ("down_proj", down)):
        setattr(experts, name, make_param_shard(parameter, layouts[name], mesh))
    other: Any = experts
    other.layouts, other.tokens = layouts, ExpertTokens(mesh)
    experts.register_forward_pre_hook(other.tokens.enter)
    experts.register_forward_hook(other.tokens.leave)
    return experts


_PARTS_OF_EXPERTS = {"gate_up_proj", "down_proj"}
_NOT_BY_FEATURES = {"is_concatenated": False, "has_gate": False, "has_bias": True, "has_post_expert_norm": True}


def _check_features(experts: nn.Module) -> None:
    """Reject experts whose results are not the sum of what ranks make of some of their features."""
    odd = [f"{name}={value}" for name, value in _NOT_BY_FEATURES.items() if getattr(experts, name, None) is value]
    odd += sorted({name for name, _ in experts.named_parameters()} ^ _PARTS_OF_EXPERTS)
    if odd:
        raise PlanError(
            "The features of experts are sharded over tp where they have gate_up_proj, the gates before the others, "
            f"and down_proj, and no other parameters. Found {type(experts).__name__}, with {', '.join(odd)} instead. "
            "Pass ep_size as well, so that ranks have full experts, or use tp_size=1."
        )


def _experts_of_ep(module: nn.Module, context: StyleContext) -> nn.Module:
    if context.mesh.size("ep") == 1:
        raise PlanError(
            f"The plan of this model shards its experts over the ep axis only. Found {type(module).__name__} on "
            f"{context.mesh}. Pass ep={context.mesh.size('tp')} as well, or use tp=1."
        )
    return shard_experts(module, context.mesh, context.expert_exchange)


STYLES: Mapping[str, Style] = {
    "colwise": _column,
    "packed_colwise(2)": partial(_column, num_projections=2),
    "packed_colwise(3)": partial(_column, num_projections=3),
    "colwise_gather_output": partial(_column, gather_output=True),
    "colwise_no_reduce": _column_without_reduce,
    "colwise_multi_query": _multi_query,
    "rowwise": partial(_row),
    "rowwise_split_input": partial(_row, parallel_input=False),
    "colwise_kv": _key_value,
    "vocab": _vocabulary,
    "lm_head": _head,
    "embedding_colwise": _head_embedding,
    "replicate": _replicate,
    "replicated_with_grad_allreduce": _replicated_with_grad_allreduce,
    "split_input": _split_input,
    "moe_tp_experts": _experts,
    "ep_experts": _experts_of_ep,
}
"""What a row of a plan may say; each takes a module and a `StyleContext`, and returns what takes its place."""

EXPERT_STYLES = ("moe_tp_experts", "ep_experts")
"""Those of experts, which are sharded where the ep axis has several ranks as well."""
