"""The layer of experts of the last versions of the older API."""

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from colossal._src.cluster import ambient_mesh
from colossal._src.legacy.moe.context import MOE_CONTEXT
from colossal._src.legacy.moe.layers import make_noise
from colossal._src.legacy.moe.load_balance import LoadBalancer
from colossal._src.legacy.notice import superseded
from colossal._src.nn.moe import (
    Capacity,
    FeedForwardExperts,
    MixtureOfExperts,
    Router,
    RouterLosses,
    shard_experts,
    shard_features,
)
from colossal.errors import ConfigError

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
    expert_parallel: Literal["EP", "TP"] | None = "EP",
    activation: str | None = None,
    drop_rate: float = 0.0,
    gated: bool = False,
    use_kernel: bool = False,
) -> nn.Module:
    """Build experts of two linear layers without biases, of which each rank keeps some.

    Args:
        num_experts: The number of experts on all ranks.
        hidden_size: The width of tokens.
        intermediate_size: The width between the layers.
        expert_parallel: ``"EP"`` where each rank keeps some experts, ``"TP"`` where it keeps some features of each;
            None for one rank.
        activation: `relu`, `gelu`, `silu` or `swiglu`, which is silu with a gate; by default silu.
        drop_rate: The probability of dropout between them.
        gated: Whether there is a gate.
        use_kernel: Accepted as documented: there is one implementation.

    Returns:
        The experts of this rank.

    Raises:
        ConfigError: The activation is unknown, or that of parallelism, or None on several ranks.
        PlanError: The ranks over which experts are sharded do not divide their number, or that of features.

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
    del use_kernel
    mesh = ambient_mesh()
    is_sharded = mesh is not None and mesh.size("ep") > 1
    if expert_parallel not in ("EP", "TP", None) or (is_sharded and expert_parallel is None):
        raise ConfigError(
            f"Experts are sharded by 'EP' or 'TP' on a mesh with an ep axis. Found {expert_parallel!r} and {mesh}. "
            "Pass one of these; None is for ep=1."
        )
    options: dict[str, Any] = {"gated": gated or activation == "swiglu", "dropout": drop_rate}
    experts = FeedForwardExperts(num_experts, hidden_size, intermediate_size, activation=chosen, **options)
    if mesh is None:
        return experts
    return shard_features(experts, mesh) if expert_parallel == "TP" else shard_experts(experts, mesh)


class SparseMLP(nn.Module):
    """A router and experts of two linear layers; the auxiliary loss is added to `MOE_CONTEXT` in training.

    Args:
        num_experts: The number of experts on all ranks.
        hidden_size: The width of tokens.
        intermediate_size: The width inside of experts.
        router_top_k: The number of experts of a token.
        parallel: How experts are sharded, as of `MLPExperts`.
        router_loss: Whether there is an auxiliary loss.
        router_norm: Let the weights of a token add up to 1.
        router_capacity_factor_train: The factor of the capacity in training.
        router_capacity_factor_eval: The factor in evaluation.
        router_min_capacity: The least that an expert takes.
        router_noisy_policy: `Jitter` or `Gaussian` noise in training; by default none.
        router_drop_tks: Whether tokens are dropped in evaluation too.
        mlp_activation: That of experts, as of `MLPExperts`.
        mlp_gated: Whether experts have a gate.
        enable_load_balance: Count the tokens of experts in training, so that `apply_load_balance` can move experts.
        load_balance_tolerance: As of `LoadBalancer`.
        load_balance_beam_width: As of `LoadBalancer`.
        load_balance_group_swap_factor: As of `LoadBalancer`.
        enable_kernel: Accepted as documented, as are the next two: there is one implementation.
        enable_comm_overlap: Accepted.
        enable_hierarchical_comm: Accepted.
        return_gate_logits: Return the scores of the router before noise and softmax next to the output.

    Attributes:
        moe: The router and the experts.
        has_loss: Whether there is an auxiliary loss.
        load_balancer: The `LoadBalancer` of the experts; None without one.

    Raises:
        ConfigError: The noise, the activation or the parallelism is unknown.

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
        parallel: Literal["EP", "TP"] | None = "EP",
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
        load_balance_tolerance: float = 0.1,
        load_balance_beam_width: int = 8,
        load_balance_group_swap_factor: float = 0.4,
        enable_kernel: bool = False,
        enable_comm_overlap: bool = False,
        enable_hierarchical_comm: bool = True,
        return_gate_logits: bool = False,
    ) -> None:
        super().__init__()
        superseded("colossal.legacy.moe.SparseMLP", "colossal.nn.moe.MixtureOfExperts(router, experts)")
        del enable_kernel, enable_comm_overlap, enable_hierarchical_comm
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
        self.has_loss, self._returns_logits = router_loss, return_gate_logits
        sizes = num_experts, hidden_size, intermediate_size
        experts = MLPExperts(*sizes, parallel, mlp_activation, gated=mlp_gated)
        self.moe = MixtureOfExperts(router, experts)
        self.load_balancer: LoadBalancer | None = None
        if enable_load_balance:
            limits = load_balance_tolerance, load_balance_beam_width, load_balance_group_swap_factor
            own: Any = experts
            self.load_balancer = LoadBalancer(own, router, own.num_experts, num_experts, None, None, *limits)

    def forward(self, inputs: torch.Tensor) -> Any:
        """Route tokens to experts.

        Args:
            inputs: Of shape (..., D).

        Returns:
            The results, of the same shape; with `return_gate_logits` the scores of the router too, of shape (..., E).
        """
        output, routing = self.moe(inputs)
        if self.training and self.has_loss:
            MOE_CONTEXT.add_loss(routing.aux_loss)
        if self.training and self.load_balancer is not None:
            self.load_balancer.update_load(routing.tokens_per_expert)
        if not self._returns_logits:
            return output
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        return output, functional.linear(inputs.to(dtype), self.moe.router.weight.to(dtype))
