"""Experts whose weights are stacked: one parameter has those of all of them.

In shapes, E is the number of experts, N a number of rows, each for one expert, D their width and F that inside.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Self

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from colossal._src.kernel import gated_silu
from colossal._src.nn.moe.gated_experts import gated_feed_forward, gated_sums
from colossal._src.nn.moe.grouped_products import counts_of, grouped_linear
from colossal._src.nn.moe.row_order import RowOrder
from colossal.errors import PlanError


class StackedExperts(nn.Module):
    """Experts that are modules of any one kind, with the parameters of all of them stacked.

    `shard_experts` gives each rank some of them, and files have one tensor for each parameter of an expert, with a row
    for each of them.

    Args:
        experts: Modules with equal parameters but for their values, and without buffers. They take rows of shape (N, D)
            and return as many.

    Attributes:
        num_experts: The number of experts that this rank has.

    Raises:
        PlanError: There are none, they differ, or have buffers.

    Example:
        >>> import torch
        >>> from colossal.nn.moe import StackedExperts
        >>> linears = [torch.nn.Linear(4, 4) for _ in range(3)]
        >>> experts = StackedExperts(linears)
        >>> {name: tuple(each.shape) for name, each in experts.named_parameters()}
        {'weight': (3, 4, 4), 'bias': (3, 4)}
        >>> tokens, one = torch.randn(2, 4), torch.ones(2, 1)
        >>> bool(experts(tokens, torch.tensor([[2], [0]]), one)[0].allclose(linears[2](tokens)[0]))
        True
    """

    num_experts: int

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        modules = [*experts]
        kinds = [{name: each.shape for name, each in module.named_parameters()} for module in modules]
        buffers = [name for module in modules for name, _ in module.named_buffers()]
        self._stacked = {name: name.replace(".", "_") for name in kinds[0]} if kinds else {}
        if not kinds or any(kind != kinds[0] for kind in kinds) or buffers or _has_equal(self._stacked.values()):
            raise PlanError(
                "Experts of one layer are at least one module, of one kind, without buffers. Found "
                f"{len(modules)} modules with the parameters {kinds[:2]} and the buffers {buffers[:3]}. Pass modules "
                "that are built alike, or a module of your own that takes hidden states, chosen experts and weights."
            )
        self.num_experts = len(modules)
        for name, stacked in self._stacked.items():
            values = [module.get_parameter(name) for module in modules]
            parameter = nn.Parameter(torch.stack([each.detach() for each in values]), values[0].requires_grad)
            self.register_parameter(stacked, parameter)
        # not a module of this one: its parameters have no values
        self._template = [deepcopy(modules[0]).to("meta")]

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of what the experts of each token make of it.

        Args:
            hidden_states: Of shape (T, D).
            chosen: The experts of each token, of shape (T, K).
            weights: Their weights, of shape (T, K).

        Returns:
            The results, of shape (T, D).
        """
        return apply_sorted(hidden_states, chosen, weights, self.num_experts, self.forward_grouped)

    def forward_grouped(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute rows that are sorted by expert.

        Args:
            rows: Of shape (N, D): those of the first expert, then those of the second, and so on.
            ends: Where the rows of each expert end, of shape (E,).

        Returns:
            The results, of shape (N, D).
        """
        values = {name: self.get_parameter(stacked).unbind() for name, stacked in self._stacked.items()}
        outputs: list[Any] = []
        for expert, part in enumerate(rows.split(counts_of(ends))):
            # without any rows one expert computes none, so that all parameters have gradients, of zeros
            if len(part) or (not len(rows) and not expert):
                of_expert = {name: each[expert] for name, each in values.items()}
                outputs.append(functional_call(self._template[0], of_expert, (part,)))
        return torch.cat(outputs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of training, of the experts too.

        Args:
            mode: Whether they train.

        Returns:
            The module.
        """
        self._template[0].train(mode)
        return super().train(mode)


class FeedForwardExperts(nn.Module):
    """Experts of two linear layers, computed by grouped matrix products: one for all experts of a rank.

    `down(activation(up(x)))`, or `down(activation(gate(x)) * up(x))`.

    Args:
        num_experts: The number of experts, E.
        width: The width of tokens, D.
        inner: The width between the layers, F.
        activation: The function between them.
        gated: Whether there is a gate.
        bias: Whether the layers have biases.
        dropout: The probability with which what the activation returns is dropped.
        device: Where the weights are made.
        dtype: Their dtype.

    Example:
        >>> import torch
        >>> from colossal.nn.moe import FeedForwardExperts
        >>> experts = FeedForwardExperts(4, width=8, inner=16)
        >>> {name: tuple(each.shape) for name, each in experts.named_parameters()}
        {'gate_up_proj': (4, 32, 8), 'down_proj': (4, 8, 16)}
        >>> experts(torch.randn(5, 8), torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2)).shape
        torch.Size([5, 8])
    """

    num_experts: int

    def __init__(
        self,
        num_experts: int,
        width: int,
        inner: int,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = functional.silu,
        gated: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.activation, self.gated, self.dropout = num_experts, activation, gated, dropout
        self._up_name = "gate_up_proj" if gated else "up_proj"
        sizes = {self._up_name: (inner * (2 if gated else 1), width), "down_proj": (width, inner)}
        for name, (outputs, inputs) in sizes.items():
            values = torch.empty(num_experts, outputs, inputs, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(values.uniform_(-(inputs**-0.5), inputs**-0.5)))
            biases = torch.zeros(num_experts, outputs, device=device, dtype=dtype)
            self.register_parameter(f"{name}_bias", nn.Parameter(biases) if bias else None)

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of what the experts of each token make of it.

        Args:
            hidden_states: Of shape (T, D).
            chosen: The experts of each token, of shape (T, K).
            weights: Their weights, of shape (T, K).

        Returns:
            The results, of shape (T, D).
        """
        if self._is_gated_alone and type(self).forward_grouped is FeedForwardExperts.forward_grouped:
            return gated_sums(
                hidden_states, chosen, weights, self.get_parameter("gate_up_proj"), self.get_parameter("down_proj")
            )
        return apply_sorted(hidden_states, chosen, weights, self.num_experts, self.forward_grouped)

    def forward_grouped(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute rows that are sorted by expert.

        Args:
            rows: Of shape (N, D): those of the first expert, then those of the second, and so on.
            ends: Where the rows of each expert end, of shape (E,).

        Returns:
            The results, of shape (N, D).
        """
        if self._is_gated_alone:
            return gated_feed_forward(rows, self.get_parameter("gate_up_proj"), self.get_parameter("down_proj"), ends)
        inner = self._linear(self._up_name, rows, ends)
        if self.gated and self.activation is functional.silu:
            inner = gated_silu(inner)
        elif self.gated:
            gate, up = inner.chunk(2, 1)
            inner = self.activation(gate) * up
        else:
            inner = self.activation(inner)
        inner = functional.dropout(inner, self.dropout, self.training)
        return self._linear("down_proj", inner, ends)

    @property
    def _is_gated_alone(self) -> bool:
        """Whether nothing is computed but two products and the SiLU of a gate."""
        is_gate = self.gated and self.activation is functional.silu
        return is_gate and self.down_proj_bias is None and not (self.dropout and self.training)

    def _linear(self, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = getattr(self, f"{name}_bias")
        return grouped_linear(rows, self.get_parameter(name), ends, bias)


def apply_sorted(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Sort copies of tokens by their experts, compute, and add up the results of each token by its weights."""
    order, ends = RowOrder.by_expert(chosen, num_experts)
    return order.add_weighted(compute(order.take(tokens), ends), weights)


def _has_equal(names: Iterable[str]) -> bool:
    listed = [*names]
    return len({*listed}) < len(listed)
