"""Experts that compute rows which are sorted by expert, as those are that `dispatch` returns.

The forward methods that experts of Hugging Face have take rows in any order: they sort and weigh them, and add up. Of
what has arrived, all of that is done.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from colossal._src.kernel import gated_silu
from colossal._src.nn.moe.gated_experts import gated_feed_forward
from colossal._src.nn.moe.grouped_products import counts_of, grouped_linear

_OF_TRANSFORMERS = ("config", "has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")
_SILU = ("SiLU", "SiLUActivation")


def forward_grouped(
    experts: nn.Module, forward: Callable[..., torch.Tensor], rows: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Compute rows that are sorted by expert, by any experts.

    Those that have a method `forward_grouped` are given the rows, and where the rows of each expert end. Of others,
    stacked weights of Hugging Face are multiplied, if the program chose grouped products; and `forward`, the forward
    method of their class, is called with one expert for each row, whose weight is 1.
    """
    own: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = getattr(experts, "forward_grouped", None)
    if own is not None:
        return own(rows, ends)
    if multiplies_groups(experts) and not rows.is_meta:
        return _multiply_stacked(experts, rows, ends)
    number, counts = len(rows), counts_of(ends)
    keys = torch.arange(len(counts), device=rows.device)
    keys = keys.repeat_interleave(torch.tensor(counts, device=rows.device), output_size=number)
    if not number:  # so that its experts have gradients, of zeros, and it takes part in the backward pass
        rows, keys = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), keys.new_zeros(1)
    return forward(rows, keys[:, None], rows.new_ones(len(rows), 1))[:number]


def multiplies_groups(experts: nn.Module) -> bool:
    """Whether stacked weights of Hugging Face are multiplied by the rows of each expert, by choice of the program."""
    if any(not hasattr(experts, name) for name in _OF_TRANSFORMERS) or getattr(experts, "has_post_expert_norm", False):
        return False
    return getattr(cast("Any", experts).config, "_experts_implementation", None) == "grouped_mm"


def _multiply_stacked(experts: Any, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Run each expert on its rows, as the module's options say."""

    def weight_of(name: str) -> torch.Tensor:
        weight = getattr(experts, name)
        return weight.mT if experts.is_transposed else weight

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = weight_of(name), getattr(experts, f"{name}_bias") if experts.has_bias else None
        return grouped_linear(x.to(weight.dtype), weight, ends, bias)

    if not experts.has_gate:
        return multiply("down_proj", experts.act_fn(multiply("up_proj", rows))).to(rows.dtype)
    is_default = type(experts)._apply_gate.__name__ == "_default_apply_gate"  # noqa: SLF001 (what a class may define)
    is_silu = is_default and type(experts.act_fn).__name__ in _SILU
    if is_silu and not experts.has_bias:
        gate_up, down = weight_of("gate_up_proj"), weight_of("down_proj")
        return gated_feed_forward(rows.to(gate_up.dtype), gate_up, down, ends).to(rows.dtype)
    opened = multiply("gate_up_proj", rows)
    hidden = gated_silu(opened) if is_silu else experts._apply_gate(opened)  # noqa: SLF001 (as above)
    return multiply("down_proj", hidden).to(rows.dtype)
