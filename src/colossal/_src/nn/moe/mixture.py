"""A layer that sends each token to some of many experts."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn

from colossal._src.cluster import ParallelMesh, ambient_mesh
from colossal._src.comm import TokenStream
from colossal._src.nn.moe.expert_parallel import Exchange, ExpertParallel, check_exchange, shard_experts
from colossal._src.nn.moe.experts import StackedExperts
from colossal._src.nn.moe.router import Router
from colossal._src.nn.moe.routing import Routing


@final
class MixtureOfExperts(nn.Module):
    """Sends each token to the experts that a router chooses, and returns the weighted sum of what these make of it.

    On a mesh with an ep axis, each rank keeps some of the experts; all its ranks run each forward pass, whatever number
    of tokens they have. A choice that the capacity of its expert dropped adds nothing, so that a residual connection
    carries such tokens on.

    Args:
        router: Chooses the experts.
        experts: `FeedForwardExperts`, another module that `shard_experts` takes, or modules of one kind, one for each
            expert, which are then stacked.
        shared: A module that all tokens go through besides.
        mesh: The mesh; the ambient one by default. Without one, and where its ep axis has one rank, the experts stay as
            they are, for `shard_experts`, or the style `ep_experts` of a plan, to shard them later.
        exchange: How tokens come to experts on other ranks, now or when these are sharded later: ``all_to_all`` or
            ``all_gather``, as of `shard_experts`.

    Raises:
        PlanError: The experts cannot be stacked, or not be sharded.
        ConfigError: `exchange` is something else.

    Communication: all_to_all, ep, as of `dispatch` and `combine`, or as of `shard_experts` with ``all_gather``. The
    shared module is computed while an all-to-all sends tokens to their experts; backward, while it sends the gradients
    of these tokens back.

    Example:
        >>> import torch
        >>> from colossal.nn.moe import FeedForwardExperts, MixtureOfExperts, Router, RouterLosses
        >>> router = Router(8, num_experts=4, top_k=2, losses=RouterLosses(aux_weight=0.01))
        >>> layer = MixtureOfExperts(router, FeedForwardExperts(4, width=8, inner=16), shared=torch.nn.Linear(8, 8))
        >>> tokens = torch.randn(2, 5, 8)
        >>> output, routing = layer(tokens)
        >>> loss = (tokens + output).square().mean() + routing.loss
        >>> loss.backward()
        >>> output.shape, routing.chosen.shape, router.weight.grad.shape
        (torch.Size([2, 5, 8]), torch.Size([10, 2]), torch.Size([4, 8]))
    """

    def __init__(
        self,
        router: Router,
        experts: nn.Module | Iterable[nn.Module],
        shared: nn.Module | None = None,
        *,
        mesh: ParallelMesh | None = None,
        exchange: Exchange = "all_to_all",
    ) -> None:
        super().__init__()
        mesh = mesh or ambient_mesh()
        if isinstance(experts, nn.ModuleList) or not isinstance(experts, nn.Module):
            experts = StackedExperts(experts)
        self.router, self.shared = router, shared
        check_exchange(exchange)
        if not isinstance(experts, ExpertParallel):  # which another layer may share
            of_layer: Any = experts
            of_layer.exchange = exchange  # for what shards them later
            experts = experts if mesh is None else shard_experts(experts, mesh, exchange)
        self.experts: nn.Module = experts
        # ranks of tp compute different tokens in their experts, and must draw equal numbers again after these
        self._stream = None if mesh is None else TokenStream(mesh, "tp")

    def forward(self, hidden_states: torch.Tensor, replay: torch.Tensor | None = None) -> tuple[torch.Tensor, Routing]:
        """Route tokens to experts, and add up the results.

        Args:
            hidden_states: Tokens, of shape (T, D) or (..., D).
            replay: A `Routing.record` to follow, instead of choosing.

        Returns:
            The results, of the shape of `hidden_states`, and what the router decided, with losses to add to that of the
            model.

        Raises:
            ShapeError: `replay` is for other tokens.
        """
        routing: Routing = self.router(hidden_states, replay)
        tokens = hidden_states.flatten(0, -2)
        of_shared: list[torch.Tensor] = []

        def meanwhile() -> None:
            if self.shared is not None:
                of_shared.append(self.shared(tokens))
            if self._stream is not None:  # for the experts, whose tokens are not those of the shared ones
                self._stream.enter()

        overlaps = self.shared is not None and isinstance(self.experts, ExpertParallel)
        if not overlaps:
            meanwhile()
        output = self._run_experts(tokens, routing, {"meanwhile": meanwhile} if overlaps else {})
        if self._stream is not None:
            self._stream.leave()
        output = sum(of_shared, output)
        return output.view(hidden_states.shape), routing

    def _run_experts(self, tokens: torch.Tensor, routing: Routing, options: dict[str, Any]) -> torch.Tensor:
        chosen, weights, kept = routing.chosen, routing.weights, routing.kept
        if kept is None:
            return self.experts(tokens, chosen, weights, **options)
        # only what is kept is sent, as a token for one expert each
        at, which = kept.nonzero(as_tuple=True)
        outputs = self.experts(tokens[at], chosen[at, which, None], weights[at, which, None], **options)
        return torch.zeros_like(tokens).index_add(0, at, outputs.to(tokens.dtype))
