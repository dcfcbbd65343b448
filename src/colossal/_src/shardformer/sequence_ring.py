"""Linear layers that multiply the tokens of one rank while those of the next are on their way.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition", 2023,
https://doi.org/10.1145/3567955.3567959.
"""

from typing import Any, final

import torch
from torch.nn import functional

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel, ring_all_gather, ring_reduce_scatter
from colossal._src.shardformer.input_gradients import InputCache

_TOKENS = -2


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
        length = x.shape[_TOKENS]
        full_x = x.new_empty(*x.shape[:_TOKENS], length * channel.size, x.shape[-1])
        out = x.new_empty(*full_x.shape[:-1], weight.shape[0])

        def visit(source: int, tokens: torch.Tensor) -> None:
            full_x.narrow(_TOKENS, source * length, length).copy_(tokens)
            out.narrow(_TOKENS, source * length, length).copy_(functional.linear(tokens, weight))

        ring_all_gather(x, channel, visit)
        ctx.channel = channel
        ctx.save_for_backward(full_x, weight)
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
        channel: Channel = ctx.channel
        length = grads[0].shape[_TOKENS]
        grad_x, full_x = torch.empty_like(x), grads[0].new_empty(*x.shape[:-1], weight.shape[0])

        def visit(source: int, grad: torch.Tensor) -> None:
            full_x.narrow(_TOKENS, source * length, length).copy_(grad)
            grad_x.narrow(_TOKENS, source * length, length).copy_(grad @ weight)

        ring_all_gather(grads[0], channel, visit)
        return grad_x, full_x.flatten(0, -2).mT @ x.flatten(0, -2), None
