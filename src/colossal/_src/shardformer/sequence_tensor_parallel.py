"""Tensor parallelism in which activations outside of attention and linear layers are sharded along the sequence.

A column-parallel layer all-gathers tokens, and a row-parallel one reduce-scatters its output: together they send as
much as the all-reduce that they replace, and the activations in between, of norms and residuals, are sharded over tp.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
https://arxiv.org/abs/2205.05198.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel, ring_all_gather, ring_reduce_scatter
from colossal._src.nn.layer.tp import ColumnParallel, RowParallel
from colossal._src.nn.moe import ExpertParallel, Router
from colossal._src.shardformer.head_layers import sum_gradient
from colossal._src.shardformer.input_gradients import InputCache, MergedInputGradient
from colossal._src.shardformer.shard_config import SequenceParallelConfig
from colossal._src.shardformer.styles import ExpertTokens
from colossal._src.tensor import ParallelPlan, find_modules
from colossal.errors import PlanError


@final
class RingInput(InputCache):
    """Column-parallel layers of one input, of which this rank has some tokens.

    The first layer multiplies tokens as they come; the others use what has come, as do all in the backward pass.

    Communication: send, tp, the bytes of a rank's tokens, once for each other rank; backward the same.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply."""
        found = self.find(x)
        if found is not None:
            return functional.linear(found, weight, bias)
        result: Any = _GatherLinear.apply(x, weight, Channel("tp", self._mesh))
        out, full_x = result
        self.keep(x, full_x)
        return out if bias is None else out + bias


def multiply_on_ring(mesh: ParallelMesh, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in a row-parallel layer, and sum up for each rank its tokens.

    Communication: send, tp, the bytes of the result, once for each other rank; backward the same.
    """
    result: Any = _LinearScatter.apply(x, weight, Channel("tp", mesh))
    return result


@final
class _GatherLinear(torch.autograd.Function):
    """Tokens of all ranks times a weight; returns the tokens as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, channel: Channel) -> tuple[torch.Tensor, torch.Tensor]:
        full_x, out = _gather_and_multiply(x, weight.mT, channel)
        ctx.channel = channel
        ctx.save_for_backward(full_x, weight)
        # The tokens are an output, so that gradients of all layers that use them come back here, and are sent once.
        return out, full_x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, full_x_grad = grads
        full_x, weight = ctx.saved_tensors
        channel: Channel = ctx.channel
        parts, others = (each.chunk(channel.size, _TOKENS) for each in (grad, full_x_grad))
        grad_x = ring_reduce_scatter(lambda rank: parts[rank] @ weight + others[rank], channel)
        return grad_x, grad.flatten(0, -2).mT @ full_x.flatten(0, -2), None


@final
class _LinearScatter(torch.autograd.Function):
    """All tokens times a weight, summed up over the ranks, each of which keeps its tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, channel: Channel) -> torch.Tensor:
        ctx.channel = channel
        ctx.save_for_backward(x, weight)
        parts = x.chunk(channel.size, _TOKENS)
        return ring_reduce_scatter(lambda rank: functional.linear(parts[rank], weight), channel)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        full_grad, grad_x = _gather_and_multiply(grads[0], weight, ctx.channel)
        return grad_x, full_grad.flatten(0, -2).mT @ x.flatten(0, -2), None


def _gather_and_multiply(x: torch.Tensor, matrix: torch.Tensor, channel: Channel) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the tokens of all ranks, and multiply those of each as they come; return both."""
    length = x.shape[_TOKENS]
    full_x = x.new_empty(*x.shape[:_TOKENS], length * channel.size, x.shape[-1])
    product = x.new_empty(*full_x.shape[:-1], matrix.shape[-1])

    def visit(source: int, tokens: torch.Tensor) -> None:
        full_x.narrow(_TOKENS, source * length, length).copy_(tokens)
        product.narrow(_TOKENS, source * length, length).copy_(tokens @ matrix)

    ring_all_gather(x, channel, visit)
    return full_x, product


_STATES = "hidden_states"
_TOKENS = -2


def shard_activations(
    base: nn.Module, layers: Sequence[nn.Module], plan: ParallelPlan, sp_config: SequenceParallelConfig
) -> None:
    """Let the linear layers of a model gather and scatter tokens."""
    mesh = sp_config.sharding.mesh
    if not plan.attention:
        raise PlanError(
            f"The mode {sp_config.mode!r} gathers tokens before attention. Found {type(base).__name__}, whose plan "
            "does not name it. Use the mode 'all_to_all' or 'ring_attn' with sp_size, or pass a ParallelPlan with "
            "attention."
        )
    attention = dict.fromkeys(module for _, module in find_modules(base, f"?{plan.attention}"))
    inside = {each for module in attention for each in module.modules()}
    for module in attention:
        _gather_around(module, mesh)
    is_ring = sp_config.mode == "ring"
    for layer in layers:
        for parent in layer.modules():
            _divide_products(parent, inside, mesh, is_ring)
    summed = {parameter: name for layer in layers for name, parameter in _of_own_tokens(layer, inside)}
    own = {module for layer in layers for module in layer.modules()}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if parameter in summed and base.get_submodule(name.rpartition(".")[0]) not in own:
            raise PlanError(
                f"In the mode {sp_config.mode!r} gradients of layers are sums over ranks, each of which has some "
                f"tokens. Found that {name}, which gets all tokens, is the {summed[parameter]} of a layer too. Use the "
                "mode 'all_to_all' with sp_size, or a parameter of its own for each."
            )
    for parameter in summed:
        sum_gradient(parameter, mesh)


def shard_tokens(layer: nn.Module, dim: int = 1, is_ring: bool = False) -> None:
    """Let one linear layer take some tokens and gather them, or sum its output up and keep some of them.

    Args:
        layer: A column-parallel or row-parallel layer.
        dim: The dimension of the tokens.
        is_ring: Multiply tokens as they come from the other ranks.
    """
    product = getattr(layer, "product", None)
    mesh: Any = getattr(product, "mesh", None)
    if isinstance(product, ColumnParallel) and is_ring:
        on_ring = RingInput(mesh)
        on_ring.watch(layer)
        product.set_matmul(on_ring)
    elif isinstance(product, ColumnParallel):
        product.set_input_transform(lambda x: comm.gather(x, "tp", dim, mesh, partial_grad=True))
    elif isinstance(product, RowParallel):
        scatter = partial(_multiply_and_scatter, dim=dim)
        product.set_matmul(partial(multiply_on_ring if is_ring else scatter, mesh))
        product.shard_tokens(("tp",))


def _divide_products(parent: nn.Module, inside: set[nn.Module], mesh: ParallelMesh, is_ring: bool) -> None:
    """Let the layers in a module gather and scatter tokens; those of attention get all of them already."""
    products = [(child, getattr(child, "product", None)) for child in parent.children()]
    columns = [product for child, product in products if isinstance(product, ColumnParallel) and child not in inside]
    if columns and is_ring:
        on_ring = RingInput(mesh)
        on_ring.watch(parent)
        for column in columns:
            column.set_matmul(on_ring)
    elif columns:
        gathered = MergedInputGradient(lambda x: comm.gather(x, "tp", _TOKENS, mesh, partial_grad=True))
        gathered.watch(parent)
        for column in columns:
            column.set_input_transform(gathered)
    for _, product in products:
        if isinstance(product, RowParallel):
            product.set_matmul(partial(multiply_on_ring if is_ring else _multiply_and_scatter, mesh))
    tokens = getattr(parent, "tokens", None)
    if isinstance(tokens, ExpertTokens):  # experts, whose weights are parameters of their own
        tokens.gather_and_scatter()
    if isinstance(parent, (ExpertParallel, Router)):
        parent.use_sharded_tokens()


def _multiply_and_scatter(
    mesh: ParallelMesh, x: torch.Tensor, weight: torch.Tensor, dim: int = _TOKENS
) -> torch.Tensor:
    return comm.reduce_scatter(nn.functional.linear(x, weight), "tp", dim, mesh)


def _gather_around(attention: nn.Module, mesh: ParallelMesh) -> None:
    """Gather all tokens before attention.

    If only column-parallel layers read them, each rank has a partial sum of their gradient. If replicated layers read
    them first, these all-reduce it as they do without sequence parallelism, and each rank has the full gradient.
    """
    is_partial = not any(isinstance(module, (nn.Linear, nn.Embedding)) for module in attention.modules())
    if is_partial:
        for module in attention.modules():
            product = getattr(module, "product", None)
            if isinstance(product, ColumnParallel):
                # Tokens are gathered around attention, and their gradient is reduce-scattered there: not again here.
                product.set_input_transform(_identity)
    attention.register_forward_pre_hook(
        _GatherStates(lambda x: comm.gather(x, "tp", 1, mesh, partial_grad=is_partial)), with_kwargs=True
    )


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


@final
class _GatherStates:
    """A hook that puts the tokens of a module's first argument together."""

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._gather = gather

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._gather(args[0]), *args[1:]), dict(kwargs)
        return args, {**kwargs, _STATES: self._gather(kwargs[_STATES])}


def _of_own_tokens(layer: nn.Module, inside: set[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Find what every rank has, and uses for its own tokens only."""
    for path, module in layer.named_modules():
        if module in inside and not isinstance(getattr(module, "product", None), RowParallel):
            continue
        layouts = getattr(module, "layouts", {})
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and not (name in layouts and any(layouts[name].dims)):
                yield f"{path}.{name}", parameter
