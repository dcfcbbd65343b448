"""The layer of experts of the last versions of the older API."""

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from colossal._src.cluster import ambient_mesh
from colossal._src.legacy.moe.context import MOE_CONTEXT
from colossal._src.legacy.moe.layers import make_noise
from colossal._src.legacy.notice import superseded
from colossal._src.nn.moe import Capacity, FeedForwardExperts, MixtureOfExperts, Router, RouterLosses, shard_experts
from colossal.errors import ConfigError, UnsupportedError

_ACTIVATIONS: dict[str, Any] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "swiglu": functional.silu,
}


def MLPExperts(  # noqa: N802 (the name of a class in the older documentation)
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: str | None = None,
    drop_rate: float = 0.0,
    gated: bool = False,
) -> nn.Module:
    """Build experts of two linear layers without biases, of which each rank keeps some.

    Args:
        num_experts: The number of experts on all ranks.
        hidden_size: The width of tokens.
        intermediate_size: The width between the layers.
        activation: `relu`, `gelu`, `silu` or `swiglu`, which is silu with a gate; by default silu.
        drop_rate: The probability of dropout between them.
        gated: Whether there is a gate.

    Returns:
        The experts of this rank.

    Raises:
        ConfigError: The activation is unknown.
        PlanError: The ranks over which experts are sharded do not divide their number.

    Example:
        >>> from colossal.legacy.moe import MLPExperts
        >>> {name: tuple(each.shape) for name, each in MLPExperts(4, 8, 16, gated=True).named_parameters()}
        {'gate_up_proj': (4, 32, 8), 'down_proj': (4, 8, 16)}
    """
    chosen = _ACTIVATIONS.get(activation or "silu")
    if chosen is None:
        raise ConfigError(
            f"The activation is one of {', '.join(_ACTIVATIONS)}. Found {activation!r}. Pass one of them."
        )
    options: dict[str, Any] = {"gated": gated or activation == "swiglu", "dropout": drop_rate}
    experts = FeedForwardExperts(num_experts, hidden_size, intermediate_size, activation=chosen, **options)
    mesh = ambient_mesh()
    return experts if mesh is None else shard_experts(experts, mesh)


class SparseMLP(nn.Module):
    """A router and experts of two linear layers; the auxiliary loss is added to `MOE_CONTEXT` in training.

    Args:
        num_experts: The number of experts on all ranks.
        hidden_size: The width of tokens.
        intermediate_size: The width inside of experts.
        router_top_k: The number of experts of a token.
        router_loss: Whether there is an auxiliary loss.
        router_norm: Let the weights of a token add up to 1.
        router_capacity_factor_train: The factor of the capacity in training.
        router_capacity_factor_eval: The factor in evaluation.
        router_min_capacity: The least that an expert takes.
        router_noisy_policy: `Jitter` or `Gaussian` noise in training; by default none.
        router_drop_tks: Whether tokens are dropped in evaluation too.
        mlp_activation: That of experts, as of `MLPExperts`.
        mlp_gated: Whether experts have a gate.
        enable_load_balance: Only False.
        enable_kernel: Accepted as documented, as are the next two: there is one implementation.
        enable_comm_overlap: Accepted.
        enable_hierarchical_comm: Accepted.

    Attributes:
        moe: The router and the experts.
        has_loss: Whether there is an auxiliary loss.

    Raises:
        ConfigError: The noise or the activation is unknown.
        UnsupportedError: Experts should move between ranks, by `enable_load_balance`.

    Communication: all_to_all, ep, as of `colossal.nn.moe.dispatch` and `colossal.nn.moe.combine`.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import SparseMLP
        >>> layer = SparseMLP(4, hidden_size=8, intermediate_size=16, router_top_k=2, mlp_gated=True)
        >>> layer(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        router_top_k: int = 1,
        router_loss: bool = True,
        router_norm: bool = False,
        router_capacity_factor_train: float = 1.25,
        router_capacity_factor_eval: float = 2.0,
        router_min_capacity: int = 4,
        router_noisy_policy: Literal["Jitter", "Gaussian"] | None = None,
        router_drop_tks: bool = True,
        mlp_activation: str | None = None,
        mlp_gated: bool = False,
        enable_load_balance: bool = False,
        enable_kernel: bool = False,
        enable_comm_overlap: bool = False,
        enable_hierarchical_comm: bool = False,
    ) -> None:
        super().__init__()
        superseded("colossal.legacy.moe.SparseMLP", "colossal.nn.moe.MixtureOfExperts(router, experts)")
        del enable_kernel, enable_comm_overlap, enable_hierarchical_comm
        if enable_load_balance:
            raise UnsupportedError(
                "Experts stay on their ranks; their load is balanced by the router. Found enable_load_balance=True. "
                "Leave it out, or write colossal.nn.moe.Router(..., bias_rate=0.001) and update_expert_biases."
            )
        evaluation = router_capacity_factor_eval if router_drop_tks else None
        capacity = Capacity(train=router_capacity_factor_train, eval=evaluation, minimum=router_min_capacity)
        router = Router(
            hidden_size,
            num_experts,
            router_top_k,
            renormalize=router_norm,
            capacity=capacity,
            noise=make_noise(router_noisy_policy, num_experts),
            losses=RouterLosses(aux_weight=float(router_loss)),
        )
        self.has_loss = router_loss
        experts = MLPExperts(num_experts, hidden_size, intermediate_size, mlp_activation, gated=mlp_gated)
        self.moe = MixtureOfExperts(router, experts)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Route tokens to experts.

        Args:
            inputs: Of shape (..., D).

        Returns:
            The results, of the same shape.
        """
        output, routing = self.moe(inputs)
        if self.training and self.has_loss:
            MOE_CONTEXT.add_loss(routing.aux_loss)
        return output
