"""What a router has decided for the tokens of a batch, and which of its choices a capacity keeps."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from dataclasses import dataclass
from typing import Literal, final

import torch

from colossal._src.nn.moe.row_order import RowOrder
from colossal.errors import ConfigError


@final
@dataclass(frozen=True)
class Routing:
    """What a router has decided for T tokens, each of which goes to K experts.

    Args:
        chosen: The experts of each token, of shape (T, K), the one with the highest score first.
        weights: Their weights, of shape (T, K), in float32 or longer; zero where a choice was dropped.
        kept: Which choices a capacity has kept, of shape (T, K); None if there is no capacity.
        tokens_per_expert: How many tokens chose each expert, before any were dropped; of shape (E,).
        aux_loss: The auxiliary loss of balancing, a scalar: 1 if the experts get as many tokens each. Zero if it has
            no weight.
        z_loss: The mean square of the log of the sum of exponentials of the scores, a scalar. Zero if it has no weight.
        loss: What to add to the loss of the model: both, each times its weight.

    Example:
        >>> import torch
        >>> from colossal.nn.moe import Capacity, Router, Routing
        >>> router = Router(8, num_experts=4, top_k=2, capacity=Capacity(train=0.5, minimum=2))
        >>> routing: Routing = router(torch.ones(6, 8))  # equal tokens: two experts of capacity 2 get all of them
        >>> routing.kept.sum(0).tolist(), int(routing.num_dropped)
        ([2, 2], 8)
    """

    chosen: torch.Tensor
    weights: torch.Tensor
    kept: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    aux_loss: torch.Tensor
    z_loss: torch.Tensor
    loss: torch.Tensor

    @property
    def num_dropped(self) -> torch.Tensor:
        """How many choices were dropped, a scalar."""
        return self.chosen.new_zeros(()) if self.kept is None else (~self.kept).sum()

    @property
    def record(self) -> torch.Tensor:
        """The decisions as one tensor of integers, of shape (T, K), to be replayed: ``~expert`` for a dropped one."""
        return self.chosen if self.kept is None else torch.where(self.kept, self.chosen, ~self.chosen)


@final
@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How many tokens an expert takes at most: the factor times those that it gets if all experts get as many.

    That is ``factor * K * T / E`` of the T tokens of one rank, rounded down and then made even. Of more, those are kept
    that are the first choice of their token, and of these as `keep` says.

    Args:
        train: The factor in training; None to keep all.
        eval: The factor in evaluation; None to keep all.
        minimum: The least that an expert takes.
        keep: The first tokens, or random ones.

    Raises:
        ConfigError: A factor is not positive, the minimum is negative, or `keep` is something else.

    Source: Lepikhin et al., "GShard", 2020, https://arxiv.org/abs/2006.16668.

    Example:
        >>> from colossal.nn.moe import Capacity
        >>> Capacity(train=1.25).of(num_tokens=64, num_experts=8, top_k=1, training=True)
        10
    """

    train: float | None = 1.25
    eval: float | None = 2.0
    minimum: int = 4
    keep: Literal["first", "random"] = "first"

    def __post_init__(self) -> None:
        factors = [each for each in (self.train, self.eval) if each is not None]
        if min(factors, default=1) <= 0 or self.minimum < 0 or self.keep not in ("first", "random"):
            raise ConfigError(
                "Factors of a capacity are positive, its minimum is not negative, and it keeps 'first' or 'random' "
                f"tokens. Found {self}. Pass None as a factor to keep all tokens."
            )

    def of(self, *, num_tokens: int, num_experts: int, top_k: int, training: bool) -> int | None:
        """Return how many tokens an expert takes at most.

        Args:
            num_tokens: The number of tokens, T.
            num_experts: The number of experts, E.
            top_k: The number of experts of a token, K.
            training: Whether the factor of training counts.

        Returns:
            The number; None if there is no limit.
        """
        factor = self.train if training else self.eval
        if factor is None:
            return None
        number = math.floor(factor * top_k * num_tokens / num_experts)
        return max(number + number % 2, self.minimum)


def keep_within(chosen: torch.Tensor, capacity: int, num_experts: int, *, at_random: bool) -> torch.Tensor:
    """Find the choices that are among the first `capacity` of their expert: first choices of all tokens come first."""
    length = len(chosen)
    order = torch.randperm(length, device=chosen.device) if at_random else torch.arange(length, device=chosen.device)
    experts = chosen[order].t().flatten()
    keys, by_expert = RowOrder.by(experts)
    starts = torch.searchsorted(keys, torch.arange(num_experts, device=keys.device))
    kept = by_expert.inverse - starts[experts] < capacity
    result = torch.empty_like(chosen, dtype=torch.bool)
    result[order] = kept.view(chosen.shape[1], length).t()
    return result
