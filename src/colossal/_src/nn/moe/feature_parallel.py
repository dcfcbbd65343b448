"""Experts of which each rank has some features: the way for numbers of experts that ranks do not divide."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable

import torch
from torch import distributed as dist

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel
from colossal._src.nn.moe.dispatch import EXPERTS
from colossal._src.nn.moe.expert_parallel import ExpertParallel, keep_shards
from colossal._src.nn.moe.experts import FeedForwardExperts
from colossal._src.nn.moe.grouped_products import grouped_linear
from colossal._src.tensor import Layout
from colossal.errors import PlanError


class FeatureParallelExperts(ExpertParallel, FeedForwardExperts):
    """What `FeedForwardExperts` are once `shard_features` has given each rank some of their features."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        meanwhile: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Compute the tokens of all ranks with the features of this one, and add up what all ranks make of its own.

        Args:
            hidden_states: Of shape (T, D).
            chosen: The experts of each token, of shape (T, K).
            weights: Their weights, of shape (T, K).
            meanwhile: Called before tokens are sent: nothing waits for others here that could compute.

        Returns:
            The results, of shape (T, D).
        """
        if meanwhile is not None:
            meanwhile()
        mesh, size, number = self.mesh, self.mesh.size(EXPERTS), len(hidden_states)
        send, receive = [number] * size, _tokens_of_ranks(number, mesh, hidden_states.device)

        def to_all(rows: torch.Tensor) -> torch.Tensor:
            return comm.exchange_rows(rows.repeat(size, 1), EXPERTS, send, receive, mesh)

        partial_sums = FeedForwardExperts.forward(self, to_all(hidden_states), to_all(chosen), to_all(weights))
        return comm.exchange_rows(partial_sums, EXPERTS, receive, send, mesh).unflatten(0, (size, number)).sum(0)

    def _linear(self, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = getattr(self, f"{name}_bias")
        if name == "down_proj" and bias is not None:  # all ranks have this one, and their results are added up
            bias = bias / self.mesh.size(EXPERTS)
        return grouped_linear(rows, self.get_parameter(name), ends, bias)


def shard_features(experts: FeedForwardExperts, mesh: ParallelMesh) -> FeedForwardExperts:
    """Give each rank of the ep axis some features of every expert of a layer, in place.

    Args:
        experts: All experts, the same on all ranks.
        mesh: The mesh.

    Returns:
        The module; unchanged where the ep axis has one rank.

    Raises:
        PlanError: The size of the ep axis does not divide the width inside, or there is tensor parallelism.

    Communication: none; a forward pass all_to_all, ep, the bytes of its tokens to every rank and as many back.
    """
    size, inner = mesh.size(EXPERTS), experts.get_parameter("down_proj").shape[2]
    if size == 1:
        return experts
    if inner % size or mesh.size("tp") > 1:
        raise PlanError(
            "The features inside of experts are sharded evenly over the ep axis, where the ranks have other tokens "
            f"each. Found {inner} features and {mesh}. Pass an ep that divides them, without tp; or tp alone, which "
            "shards the features of experts too."
        )
    layouts: dict[str, Layout] = {}
    for name, parameter in list(experts.named_parameters()):
        if name == "down_proj_bias":
            continue
        shape, dims = tuple(parameter.shape), "RRS0" if name == "down_proj" else "RS0" + "R" * (parameter.dim() - 2)
        blocks: list[tuple[int, ...]] = [(length,) for length in shape]
        if name.startswith("gate_up_proj"):  # the gate's features, then the others
            blocks[1] = (inner, inner)
        layouts[name] = Layout.parse(dims, shape, mesh=mesh, axes=[EXPERTS], groups=blocks)
    keep_shards(experts, layouts, mesh, FeatureParallelExperts)
    return experts


def _tokens_of_ranks(number: int, mesh: ParallelMesh, device: torch.device) -> list[int]:
    """Tell all ranks how many tokens this one has, and learn it of them."""
    channel = Channel(EXPERTS, mesh)
    if device.type == "meta" or dist.get_backend(channel.group) == "fake":
        return [number] * channel.size  # nothing was sent: all ranks are assumed to have as many
    own = torch.full((channel.size, 1), number, dtype=torch.int64, device=device)
    return channel.all_to_all(own, 0, 0).flatten().tolist()
