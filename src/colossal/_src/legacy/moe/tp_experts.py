"""Experts of which each rank has some features, and the choice between these and experts of which it has some."""

from typing import Any

from torch import nn
from torch.nn import functional

from colossal._src.cluster import ambient_mesh
from colossal._src.legacy.moe.base_experts import MoeParallelInfo
from colossal._src.legacy.moe.layers import Activation, FFNExperts
from colossal._src.legacy.notice import superseded
from colossal._src.nn.moe import FeedForwardExperts, shard_features
from colossal.errors import PlanError

_SUCCESSOR = "colossal.nn.moe.MixtureOfExperts(router, experts)"


def TPExperts(  # noqa: N802 (the name of a class in the older documentation)
    num_experts: int, d_model: int, d_ff: int, activation: Activation | None = None, drop_rate: float = 0.0
) -> nn.Module:
    """Build experts of two linear layers with biases, of each of which each rank keeps some features.

    For numbers of experts that the ranks do not divide: every rank computes all tokens.

    Args:
        num_experts: The number of experts.
        d_model: The width of tokens.
        d_ff: The width between the layers.
        activation: The function between them; by default GELU.
        drop_rate: The probability of dropout between them.

    Returns:
        The experts, for `MoeLayer`.

    Raises:
        PlanError: The ranks over which experts are sharded do not divide `d_ff`, or there is tensor parallelism.

    Example:
        >>> from colossal.legacy.moe import TPExperts
        >>> TPExperts(3, d_model=8, d_ff=16).up_proj.shape
        torch.Size([3, 16, 8])
    """
    superseded("colossal.nn.layer.moe", _SUCCESSOR)
    chosen = functional.gelu if activation is None else activation
    options: dict[str, Any] = {"gated": False, "bias": True, "dropout": drop_rate}
    experts = FeedForwardExperts(num_experts, d_model, d_ff, activation=chosen, **options)
    mesh = ambient_mesh()
    return experts if mesh is None else shard_features(experts, mesh)


def build_ffn_experts(
    num_experts: int,
    d_model: int,
    d_ff: int,
    activation: Activation | None = None,
    drop_rate: float = 0.0,
) -> nn.Module:
    """Build `FFNExperts`, or `TPExperts` if the ranks do not divide the number of experts.

    Args:
        num_experts: The number of experts on all ranks.
        d_model: The width of tokens.
        d_ff: The width between the layers.
        activation: The function between them; by default GELU.
        drop_rate: The probability of dropout between them.

    Returns:
        The experts of this rank.

    Raises:
        PlanError: The ranks divide neither the number of experts nor `d_ff`.

    Example:
        >>> from colossal.legacy.moe import build_ffn_experts
        >>> build_ffn_experts(4, d_model=8, d_ff=16).num_experts
        4
    """
    size = MoeParallelInfo.of(ambient_mesh()).ep_size
    if num_experts % size and d_ff % size:
        raise PlanError(
            f"Ranks divide the number of experts or their features. Found num_experts={num_experts} and d_ff={d_ff} "
            f"for {size} ranks of the ep axis. Pass a multiple of these for one of both."
        )
    build = TPExperts if num_experts % size else FFNExperts
    return build(num_experts, d_model, d_ff, activation, drop_rate)
