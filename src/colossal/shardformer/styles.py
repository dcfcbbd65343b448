"""How one module is divided along the tp axis.

=========  =========================================================================================================
style      what becomes of the module
=========  =========================================================================================================
col        a linear layer of whose features each rank makes some; ``col/3`` if three pieces are packed into it
col+       the same, whose output is put together again
col-       col, of an input whose gradient is summed up already
col/mq     a linear layer into queries, as many as it has inputs, and behind them one key and value for all heads:
           those are made by all ranks together
row        a linear layer that takes some features on each rank, and sums up
row+       the same, that takes whole inputs
kv         col; where there are fewer heads than ranks, ranks that need the same head share it
vocab      a table of embeddings, some rows on each rank
head       the linear layer into the words of a vocabulary, some of them on each rank; for a loss that knows
heads      a table with a column for each head, some of them on each rank
whole      a layer that stays whole, of whose output each rank makes heads of its own: its gradient is summed up
shared     parameters of a module itself that each rank uses for heads of its own: their gradients are summed up
cut        a module that reads off its input how many features it has: that is cut, and the col layers in it put it
           together again
experts    the linear layers of experts in one tensor each, of whose inner features each rank has some
=========  =========================================================================================================
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from colossal import comm
from colossal.cluster import ParallelMesh
from colossal.comm import Channel
from colossal.nn import Linear1D_Col, Linear1D_Row, VocabParallelEmbedding
from colossal.nn.layer.grid.arrangement import lay, part_of
from colossal.nn.layer.grid.layer import part_for
from colossal.shardformer.conv1d import Conv1DCol, Conv1DRow
from colossal.shardformer.heads import HeadTable, SharedHeads, with_values


@final
@dataclass(frozen=True)
class Division:
    """What a style needs to know besides the module.

    Args:
        mesh: The mesh, whose tp axis divides.
        num_key_value_heads: How many heads keys and values have in the whole model; None for as many as queries.
        gathers_logits: Whether logits are put together.

    Example:
        >>> from torch import nn
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.shardformer import STYLES, Division
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     STYLES["col"](nn.Linear(4, 6), Division(ParallelMesh(tp=2))).weight.shape
        torch.Size([3, 4])
    """

    mesh: ParallelMesh
    num_key_value_heads: int | None = None
    gathers_logits: bool = True


Style = Callable[[nn.Module, Division], nn.Module]


def _column(module: nn.Module, division: Division, num_pieces: int = 1, **options: Any) -> nn.Module:
    if isinstance(module, nn.Linear):
        return Linear1D_Col.from_native(
            module, division.mesh, split_sizes=_pieces(module.out_features, num_pieces), **options
        )
    conv: Any = module
    return Conv1DCol.from_native(conv, division.mesh, split_sizes=_pieces(conv.nf, num_pieces))


def _column_of_summed(module: nn.Module, division: Division) -> nn.Module:
    layer: Any = _column(module, division)
    layer.product.enter_by(_as_it_is)
    return layer


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _multi_query(module: nn.Module, division: Division) -> nn.Module:
    """Cut queries, and key and value, each by itself, and put the latter together, as all heads use them."""
    assert isinstance(module, nn.Linear)
    mesh, queries, total = division.mesh, module.in_features, module.out_features
    layer = Linear1D_Col.from_native(module, mesh, split_sizes=[queries, total - queries])
    own = part_of(queries, ("tp",), mesh)

    def gather(_layer: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        shared = comm.gather(output[..., own:], "tp", -1, mesh, partial_grad=True, length=total - queries)
        return torch.cat([output[..., :own], shared], -1)

    layer.register_forward_hook(gather)
    return layer


def _pieces(features: int, number: int) -> list[int] | None:
    return [features // number] * number if number > 1 else None


def _row(module: nn.Module, division: Division, **options: Any) -> nn.Module:
    kind: Any = Linear1D_Row if isinstance(module, nn.Linear) else Conv1DRow
    return kind.from_native(module, division.mesh, **options)


def _key_value(module: nn.Module, division: Division) -> nn.Module:
    heads = division.num_key_value_heads
    if heads is None or heads >= division.mesh.size("tp"):
        return _column(module, division)
    return SharedHeads(module, heads, division.mesh)


def _vocabulary(module: nn.Module, division: Division) -> nn.Module:
    return VocabParallelEmbedding.from_native(module, division.mesh)


def _head(module: nn.Module, division: Division) -> nn.Module:
    return _column(module, division, gather_output=division.gathers_logits)


def _table_of_heads(module: nn.Module, division: Division) -> nn.Module:
    return HeadTable.from_native(module, division.mesh)


def _whole(module: nn.Module, division: Division) -> nn.Module:
    def leave(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return comm.replicate(output, "tp", division.mesh)

    module.register_forward_hook(leave)
    return module


def _cut(module: nn.Module, division: Division) -> nn.Module:
    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (comm.scatter(args[0], "tp", -1, division.mesh), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": comm.scatter(kwargs["hidden_states"], "tp", -1, division.mesh)}

    module.register_forward_pre_hook(enter, with_kwargs=True)
    return module


def _shared(module: nn.Module, division: Division) -> nn.Module:
    for parameter in (each for each in module.parameters(recurse=False) if each.requires_grad):
        with_values(parameter).register_hook(Channel("tp", division.mesh).all_reduce)
    return module


@final
class ExpertTokens:
    """What enters and leaves divided experts: all tokens, or under sequence parallelism those of each rank."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh, self._are_shared = mesh, False

    def share(self) -> None:
        """Gather tokens, of which each rank has some, before the experts, and divide them again behind."""
        self._are_shared = True

    def enter(self, _experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The forward pre-hook of the experts."""
        hidden, chosen, weights = args
        mesh = self._mesh
        if not self._are_shared:
            return comm.replicate(hidden, "tp", mesh), chosen, comm.replicate(weights, "tp", mesh)
        hidden, weights = (comm.gather(each, "tp", 0, mesh, partial_grad=True) for each in (hidden, weights))
        return hidden, comm.gather(chosen, "tp", 0, mesh), weights

    def leave(self, _experts: nn.Module, _args: Any, output: Any) -> Any:
        """The forward hook of the experts."""
        return (
            comm.reduce_scatter(output, "tp", 0, self._mesh)
            if self._are_shared
            else comm.reduce(output, "tp", self._mesh)
        )


def _experts(module: nn.Module, division: Division) -> nn.Module:
    mesh, experts = division.mesh, module
    up, down = experts.get_parameter("gate_up_proj"), experts.get_parameter("down_proj")
    inner = up.shape[1] // 2
    layouts = {
        "gate_up_proj": lay(mesh, tuple(up.shape), {1: ("tp",)}, {1: (inner, inner)}),
        "down_proj": lay(mesh, tuple(down.shape), {2: ("tp",)}),
    }
    for name, whole in (("gate_up_proj", up), ("down_proj", down)):
        setattr(experts, name, part_for(whole, layouts[name], mesh))
    other: Any = experts
    other.layouts, other.tokens = layouts, ExpertTokens(mesh)
    experts.register_forward_pre_hook(other.tokens.enter)
    experts.register_forward_hook(other.tokens.leave)
    return experts


STYLES: Mapping[str, Style] = {
    "col": _column,
    "col/2": partial(_column, num_pieces=2),
    "col/3": partial(_column, num_pieces=3),
    "col+": partial(_column, gather_output=True),
    "col-": _column_of_summed,
    "col/mq": _multi_query,
    "row": partial(_row),
    "row+": partial(_row, parallel_input=False),
    "kv": _key_value,
    "vocab": _vocabulary,
    "head": _head,
    "heads": _table_of_heads,
    "whole": _whole,
    "shared": _shared,
    "cut": _cut,
    "experts": _experts,
}
"""What a row of a plan may say; each takes a module and a `Division`, and returns what takes its place."""
