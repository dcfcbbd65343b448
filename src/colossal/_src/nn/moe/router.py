"""Choose the experts of each token.

In shapes, T is the number of tokens of this rank, D their width, E the number of experts, K the number of experts that
a token goes to, and B the number of sequences of a batch.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import nn
from torch.nn import functional

from colossal._src import comm
from colossal._src.cluster import Axis, ParallelMesh, ambient_mesh
from colossal._src.comm import Channel
from colossal._src.nn.layer.tp import broadcast_rng_state
from colossal._src.nn.moe.routing import Capacity, Routing, keep_within
from colossal.errors import ConfigError, ShapeError

_WITH_OTHER_TOKENS: tuple[Axis, ...] = ("dp", "sp", "tp")  # of one stage; equal tokens on tp count equally often


@final
@dataclass(frozen=True)
class GroupLimit:
    """Lets a token choose only among the experts of its best groups, as DeepSeek-V3 does.

    Args:
        num_groups: Into how many groups of consecutive experts these are divided.
        num_chosen: From how many of these a token chooses: those whose two best scores have the highest sum.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, https://arxiv.org/abs/2412.19437.

    Example:
        >>> import torch
        >>> from colossal.nn.moe import GroupLimit, Router
        >>> router = Router(8, num_experts=16, top_k=4, group_limit=GroupLimit(num_groups=4, num_chosen=2))
        >>> chosen = router(torch.randn(100, 8)).chosen // 4
        >>> max(len(set(groups)) for groups in chosen.tolist()) <= 2
        True
    """

    num_groups: int
    num_chosen: int

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Set the scores of experts in other groups to minus infinity.

        Args:
            scores: Of shape (T, E).

        Returns:
            Scores of the same shape.
        """
        grouped = scores.unflatten(1, (self.num_groups, -1))
        of_groups = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
        best = of_groups.topk(self.num_chosen, dim=1).indices
        is_other = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, best, value=False)
        return grouped.masked_fill(is_other.unsqueeze(2), float("-inf")).flatten(1)


@final
@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """The losses that a router adds to that of a model.

    Args:
        aux_weight: The weight of the auxiliary loss, E times the sum over experts of the part of choices that an expert
            gets times its mean score.
        aux_over: The tokens over which both are taken: those of a batch, those of each sequence of it (and then the
            mean over these), or those of all batches of the dp axis. Where ranks shard sequences, over sp or tp, the
            tokens of all of them count.
        z_weight: The weight of the z-loss, which keeps scores small.

    Raises:
        ConfigError: `aux_over` is something else.

    Source: Fedus et al., "Switch Transformers", 2021, https://arxiv.org/abs/2101.03961; Zoph et al., "ST-MoE", 2022,
    https://arxiv.org/abs/2202.08906.

    Example:
        >>> import torch
        >>> from colossal.nn.moe import Router, RouterLosses
        >>> router = Router(8, num_experts=4, top_k=1, losses=RouterLosses(aux_weight=0.01, aux_over="sequence"))
        >>> bool(router(torch.randn(2, 16, 8)).loss > 0.01)  # the balanced loss is 1
        True
    """

    aux_weight: float = 0.0
    aux_over: Literal["batch", "sequence", "global"] = "batch"
    z_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.aux_over not in ("batch", "sequence", "global"):
            raise ConfigError(
                f"The auxiliary loss is taken over a 'batch', each 'sequence', or 'global'. Found {self.aux_over!r}. "
                "Pass one of these as aux_over."
            )


class Router(nn.Module):
    """Chooses K of E experts for each token, and weighs them by their scores.

    Scores are computed in float32, or in float64 if the tokens are. The ranks of the tp axis, which have the same
    tokens, draw the same noise.

    Args:
        width: The width of tokens, D.
        num_experts: The number of experts, E.
        top_k: The number of experts of a token, K.
        scores: `softmax` over all experts, or `sigmoid` of each.
        renormalize: Let the weights of a token add up to 1.
        scale: By what weights are multiplied.
        group_limit: Among which experts a token chooses.
        capacity: How many tokens an expert takes; by default as many as choose it.
        noise: What changes logits in training: `GaussianNoise`, `UniformNoise`, or another function.
        losses: Losses for balance and for small scores.
        bias_rate: By how much `update_expert_biases` changes the bias of each expert; 0 for no biases. A bias counts
            for the choice, not for the weight.
        forced_balance: For measurements: choose experts in turn, whatever their scores are.
        mesh: The mesh; the ambient one by default.
        device: Where the weights are made.
        dtype: Their dtype.

    Attributes:
        weight: The weights of the scores, of shape (E, D).
        bias_steps: The biases in units of `bias_rate`, of shape (E,): integers, which no cast to half precision rounds.
            None without biases.

    Raises:
        ConfigError: K is not between 1 and E, groups do not divide experts, or have too few, or `scores` is unknown.

    Communication: when it is built, broadcast, tp, 5 KB of the state of the random numbers. A forward pass with an
    auxiliary loss: all_reduce, sp, and tp where its ranks shard sequences, 8 E bytes (float32), of each sequence with
    `aux_over="sequence"`; with `aux_over="global"` over dp as well. With a z-loss, over such a tp, 4 bytes more.

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017, https://arxiv.org/abs/1701.06538.

    Example:
        >>> import torch
        >>> from colossal.nn.moe import Router
        >>> router, tokens = Router(8, num_experts=4, top_k=2, renormalize=True), torch.randn(10, 8)
        >>> routing = router(tokens)
        >>> routing.chosen.shape, routing.weights.sum(1).allclose(torch.ones(10)), int(routing.tokens_per_expert.sum())
        (torch.Size([10, 2]), True, 20)
        >>> again = router(tokens, replay=routing.record)
        >>> bool((again.weights == routing.weights).all())
        True
    """

    bias_steps: torch.Tensor | None
    _are_tokens_sharded = False

    def __init__(
        self,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = False,
        scale: float = 1.0,
        group_limit: GroupLimit | None = None,
        capacity: Capacity | None = None,
        noise: Callable[[torch.Tensor], torch.Tensor] | None = None,
        losses: RouterLosses | None = None,
        bias_rate: float = 0.0,
        forced_balance: bool = False,
        mesh: ParallelMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        groups = group_limit or GroupLimit(1, 1)
        in_reach = num_experts // max(groups.num_groups, 1) * groups.num_chosen
        divides = groups.num_groups > 0 and num_experts % groups.num_groups == 0
        if not (1 <= top_k <= in_reach and divides and groups.num_chosen <= groups.num_groups):
            raise ConfigError(
                "A token goes to at least one expert and at most to those that it may choose from, which are whole "
                f"groups of equal size. Found top_k={top_k}, num_experts={num_experts} and {groups}. Pass a top_k of "
                "at most num_experts / num_groups * num_chosen."
            )
        if scores not in ("softmax", "sigmoid"):
            raise ConfigError(f"Scores are 'softmax' or 'sigmoid'. Found {scores!r}. Pass one of these.")
        self.num_experts, self.top_k, self.scores = num_experts, top_k, scores
        self.renormalize, self.scale, self.group_limit = renormalize, scale, group_limit
        self.capacity, self.noise = capacity or Capacity(train=None, eval=None), noise
        self.losses, self.bias_rate, self.forced_balance = losses or RouterLosses(), bias_rate, forced_balance
        self.mesh = mesh or ambient_mesh()
        self.weight = nn.Parameter(torch.empty(num_experts, width, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=width**-0.5)
        # No buffer of floating-point numbers, which plugins cast, and none of counts, which differ between ranks.
        steps = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("bias_steps", steps if bias_rate else None)
        self._counts: torch.Tensor | None = None
        if noise is not None or self.capacity.keep == "random":
            broadcast_rng_state(self.mesh)

    def use_sharded_tokens(self) -> None:
        """Take tokens for those of this rank only; otherwise the ranks of tp have the same.

        Modes of sequence parallelism that shard tokens over tp call this. These ranks add up their gradients.
        """
        self._are_tokens_sharded = self.mesh is not None and self.mesh.size("tp") > 1

    def forward(self, hidden_states: torch.Tensor, replay: torch.Tensor | None = None) -> Routing:
        """Choose experts for tokens.

        Args:
            hidden_states: Tokens, of shape (T, D), or (B, T / B, D) for B sequences.
            replay: What an earlier `Routing.record` chose and dropped, of shape (T, K). Weights and losses are those of
                the scores of now.

        Returns:
            The decisions.

        Raises:
            ShapeError: `replay` is for other tokens.
        """
        tokens = hidden_states.flatten(0, -2)
        # autocast, too, would compute scores in half precision
        with nullcontext() if tokens.is_meta else torch.autocast(tokens.device.type, enabled=False):
            dtype = torch.promote_types(tokens.dtype, torch.float32)
            logits = functional.linear(tokens.to(dtype), self.weight.to(dtype))
            if self.noise is not None and self.training:
                logits = self.noise(logits)
            num_sequences = hidden_states.shape[:-2].numel()  # 1 for (T, D)
            return self._route(logits, num_sequences, replay)

    def _route(self, logits: torch.Tensor, num_sequences: int, replay: torch.Tensor | None) -> Routing:
        losses = self.losses
        # a softmax over the chosen alone is that over all, divided by their sum
        among_chosen = self.renormalize and self.scores == "softmax"
        scores = logits  # which have the order of their softmax
        if not among_chosen or losses.aux_weight or self.bias_steps is not None or self.group_limit is not None:
            scores = logits.softmax(1) if self.scores == "softmax" else logits.sigmoid()
        chosen, kept = self._choose(scores.detach()) if replay is None else self._replay(replay, len(logits))
        weights = (logits if among_chosen else scores).gather(1, chosen)
        if among_chosen:
            weights = weights.softmax(1)
        elif self.renormalize:
            weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        if self.scale != 1:
            weights = weights * self.scale
        if kept is not None:
            weights = weights * kept
        counts = torch.zeros(num_sequences, self.num_experts, dtype=torch.int64, device=chosen.device)
        of_sequences = chosen.reshape(num_sequences, -1)
        counts.scatter_add_(1, of_sequences, torch.ones_like(of_sequences))
        total = counts.sum(0)
        if self.bias_steps is not None and self.training and weights.requires_grad:
            # A layer that activation checkpointing computes again runs one backward pass, as any other.
            weights.register_hook(lambda _: self._count(total))
        zero = logits.new_zeros(())
        aux_loss = self._aux_loss(scores, counts) if losses.aux_weight else zero
        z_loss = logits.logsumexp(1).square().sum() / max(len(logits), 1) if losses.z_weight else zero
        if losses.z_weight and self._are_tokens_sharded and self.mesh is not None:
            z_loss = comm.reduce(z_loss / self.mesh.size("tp"), "tp", self.mesh)
        has_loss = losses.aux_weight or losses.z_weight
        loss = losses.aux_weight * aux_loss + losses.z_weight * z_loss if has_loss else zero
        return Routing(chosen, weights, kept, total, aux_loss, z_loss, loss)

    def _choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Take the best experts of each token, and keep what their capacity allows."""
        if self.forced_balance:
            places = torch.arange(scores.shape[0] * self.top_k, device=scores.device)
            chosen = places.view(-1, self.top_k) % self.num_experts
        else:
            if self.bias_steps is not None:
                scores = scores + self.bias_steps * self.bias_rate
            if self.group_limit is not None:
                scores = self.group_limit.mask(scores)
            chosen = scores.topk(self.top_k, dim=1).indices
        sizes = {"num_tokens": len(scores), "num_experts": self.num_experts, "top_k": self.top_k}
        limit = self.capacity.of(**sizes, training=self.training)
        at_random = self.capacity.keep == "random"
        kept = None if limit is None else keep_within(chosen, limit, self.num_experts, at_random=at_random)
        return chosen, kept

    def _replay(self, record: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if record.shape != (num_tokens, self.top_k):
            raise ShapeError(
                f"What is replayed was recorded for the same tokens. Found {num_tokens} tokens with {self.top_k} "
                f"experts each, and a record of shape {tuple(record.shape)}. Pass Routing.record of this layer and "
                "this batch."
            )
        kept = record >= 0
        if not record.is_meta and bool(kept.all()):  # then it takes the way of the choice that it is of, bit by bit
            return record, None
        return torch.where(kept, record, ~record), kept

    def _aux_loss(self, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """E times the sum of means of scores times parts of choices, over the tokens that are asked for."""
        if self.scores == "sigmoid":
            scores = scores / scores.sum(1, keepdim=True)
        over, num_sequences = self.losses.aux_over, len(counts)
        if over != "sequence":
            counts, num_sequences = counts.sum(0, keepdim=True), 1
        sums = scores.unflatten(0, (num_sequences, len(scores) // num_sequences)).sum(1)
        parts = counts.to(sums.dtype)
        sums, parts = self._over_ranks(sums, parts)
        num_choices = parts.sum(1).clamp_min(1)
        num_tokens = num_choices / self.top_k
        return self.num_experts * ((sums * parts).sum(1) / (num_tokens * num_choices)).mean()

    def _over_ranks(self, sums: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add up scores and choices of the ranks that have other tokens of a sequence, or of any."""
        mesh = self.mesh
        averaged: tuple[Axis, ...] = ("dp", "sp") if self.losses.aux_over == "global" else ("sp",)
        axes: tuple[Axis, ...] = (*averaged, "tp") if self._are_tokens_sharded else averaged
        if mesh is None or all(mesh.size(axis) == 1 for axis in axes):
            return sums, parts
        both = torch.cat([sums.detach(), parts])
        for axis in axes:
            both = Channel(axis, mesh).all_reduce(both)
        # Gradients are averaged over dp and sp: each rank adds those of its own tokens, as often as there are ranks.
        factor = math.prod(mesh.size(axis) for axis in averaged)
        return both[: len(sums)] + factor * (sums - sums.detach()), both[len(sums) :]

    def _count(self, tokens_per_expert: torch.Tensor) -> None:
        self._counts = tokens_per_expert if self._counts is None else self._counts + tokens_per_expert

    def take_counts(self) -> torch.Tensor:
        """Return how many tokens chose each expert in the backward passes since the last call, and begin anew.

        Returns:
            The numbers, of shape (E,).
        """
        counts, self._counts = self._counts, None
        return torch.zeros(self.num_experts, dtype=torch.int64, device=self.weight.device) if counts is None else counts

    def extra_repr(self) -> str:
        """Name the sizes.

        Returns:
            What is printed between the parentheses.
        """
        return f"num_experts={self.num_experts}, top_k={self.top_k}, scores={self.scores!r}"


def update_expert_biases(model: nn.Module, mesh: ParallelMesh | None = None) -> None:
    """Let experts that got fewer tokens than the mean be chosen more often, without an auxiliary loss.

    Call it once after each step of the optimizer. It counts the tokens of all backward passes since the last call, of
    all ranks; those that activation checkpointing computes again count once.

    Args:
        model: A model with routers whose `bias_rate` is not 0, boosted or not; others it leaves alone.
        mesh: The mesh; by default that of the routers.

    Communication: all_reduce, dp, sp and tp, 8 bytes for each expert of all routers.

    Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024,
    https://arxiv.org/abs/2408.15664.

    Example:
        >>> import torch
        >>> from colossal.nn.moe import Router, update_expert_biases
        >>> router = Router(8, num_experts=4, top_k=1, bias_rate=0.01)
        >>> router(torch.ones(5, 8)).weights.sum().backward()  # all tokens go to one expert
        >>> update_expert_biases(router)
        >>> sorted(router.bias_steps.tolist())
        [-1, 1, 1, 1]
    """
    modules: list[Any] = [*model.modules()]
    routers = [each for each in modules if isinstance(each, Router) and each.bias_steps is not None]
    if not routers:
        return
    counts = torch.cat([each.take_counts() for each in routers])
    if (found := mesh or routers[0].mesh) is not None:
        for axis in _WITH_OTHER_TOKENS:
            counts = Channel(axis, found).all_reduce(counts)
    for router, number in zip(routers, counts.split([each.num_experts for each in routers]), strict=True):
        assert router.bias_steps is not None
        router.bias_steps += torch.sign(number.sum() - number * router.num_experts)
