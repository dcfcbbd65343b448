"""Operations of layers of experts that programs write by themselves, by their older names."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src import comm
from colossal._src.legacy.mesh import grid_of_group
from colossal._src.legacy.notice import superseded
from colossal.errors import ConfigError, ShapeError, UnsupportedError


def all_to_all_uneven(
    inputs: torch.Tensor,
    input_split_sizes: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    overlap: bool = False,
    fp8_communication: bool = False,
) -> tuple[torch.Tensor, None]:
    """Send each rank rows of a tensor, and receive rows from each; their gradients go back the same way.

    Args:
        inputs: The rows, in the order of the ranks that get them; (rows, ...).
        input_split_sizes: How many rows each rank gets; by default as many.
        output_split_sizes: How many rows come from each rank; by default as many from each.
        group: The ranks; by default all.
        overlap: Only False.
        fp8_communication: Only False.

    Returns:
        The rows that came in, in rank order, and None: nothing is to be waited for.

    Raises:
        ShapeError: The sizes are not as many as ranks, or do not add up to the rows.
        UnsupportedError: `overlap` or `fp8_communication`.

    Communication: all_to_all, the group, the bytes of the rows that leave this rank; backward the same.
    """
    superseded("colossal.moe._operation.all_to_all_uneven", "colossal.nn.moe.dispatch and colossal.nn.moe.combine")
    if overlap or fp8_communication:
        raise UnsupportedError(
            f"Rows are sent in their dtype, and waited for. Found overlap={overlap}, "
            f"fp8_communication={fp8_communication}. Leave these out."
        )
    mesh = grid_of_group(group or dist.group.WORLD)
    number = mesh.size("tp")
    even = [len(inputs) // number] * number
    sent = even if input_split_sizes is None else [*input_split_sizes]
    arriving = even if output_split_sizes is None else [*output_split_sizes]
    if len(sent) != number or len(arriving) != number or sum(sent) != len(inputs):
        raise ShapeError(
            f"Each of {number} ranks sends and receives so many rows. Found {len(inputs)} rows, "
            f"input_split_sizes={sent} and output_split_sizes={arriving}. Pass {number} sizes each, the former of "
            "which add up to the number of rows."
        )
    return comm.exchange_rows(inputs, "tp", sent, arriving, mesh), None


def moe_cumsum(inputs: torch.Tensor, use_kernel: bool = False) -> torch.Tensor:
    """Number the tokens of each expert.

    Args:
        inputs: 1 where a token goes to an expert, (tokens, experts).
        use_kernel: Accepted as documented: the result is the same.

    Returns:
        How many tokens before it go to the expert, where one does; (tokens, experts).
    """
    del use_kernel
    return inputs.cumsum(0) - 1


class _GradScaler(torch.autograd.Function):
    """The identity, whose gradient is multiplied by ``ctx.factor``."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (grads[0] * ctx.factor, *[None] * ctx.num_sizes)


@final
class EPGradScalerIn(_GradScaler):
    """The identity of what goes to experts; its gradient is multiplied by the number of ranks over which these are."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, ep_size: int) -> torch.Tensor:
        """Return the input."""
        ctx.factor, ctx.num_sizes = float(ep_size), 1
        return inputs.view_as(inputs)


@final
class EPGradScalerOut(_GradScaler):
    """The identity of what comes from experts; its gradient is divided by the number of ranks over which these are."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, ep_size: int) -> torch.Tensor:
        """Return the input."""
        ctx.factor, ctx.num_sizes = 1 / ep_size, 1
        return inputs.view_as(inputs)


@final
class DPGradScalerIn(_GradScaler):
    """The identity of what goes to an expert; its gradient is multiplied by the part of its copies that got tokens."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, moe_dp_size: int, activated_experts: int) -> torch.Tensor:
        """Return the input."""
        ctx.factor, ctx.num_sizes = _activated(activated_experts) / moe_dp_size, 2
        return inputs.view_as(inputs)


@final
class DPGradScalerOut(_GradScaler):
    """The identity of what comes from an expert; its gradient is divided by the part of its copies that got tokens."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, moe_dp_size: int, activated_experts: int) -> torch.Tensor:
        """Return the input."""
        ctx.factor, ctx.num_sizes = moe_dp_size / _activated(activated_experts), 2
        return inputs.view_as(inputs)


def _activated(number: int) -> int:
    if number < 1:
        raise ConfigError(
            f"Gradients of an expert are scaled where a copy of it got tokens. Found activated_experts={number}. Leave "
            "the expert out."
        )
    return number
