"""Layers of experts by their older names."""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn import functional

from colossal._src.cluster import ambient_mesh
from colossal._src.legacy.moe.base_experts import BaseExperts
from colossal._src.legacy.moe.context import MOE_CONTEXT, drops_graph
from colossal._src.legacy.moe.routers import NoiseFunction, NormalNoiseGenerator, TopKRouter, UniformNoiseGenerator
from colossal._src.legacy.notice import superseded
from colossal._src.nn.moe import (
    FeedForwardExperts,
    MixtureOfExperts,
    Routing,
    StackedExperts,
    pad_experts,
    shard_experts,
)
from colossal.errors import ConfigError, UnsupportedError

Activation = Callable[[torch.Tensor], torch.Tensor]

_SUCCESSOR = "colossal.nn.moe.MixtureOfExperts(router, experts)"


def Experts(  # noqa: N802 (the name of a class in the older documentation)
    expert: Callable[..., nn.Module] | None = None,
    num_experts: int = 1,
    *,
    expert_cls: Callable[..., nn.Module] | None = None,
    **expert_args: Any,
) -> nn.Module:
    """Build experts of one class, of which each rank keeps some.

    All ranks build all of them, one after the other, and must draw the same values: see `moe_set_seed`.

    Args:
        expert: The class of an expert, or a function that builds one.
        num_experts: The number of experts on all ranks.
        expert_cls: Another name of `expert`.
        **expert_args: The arguments of the class.

    Returns:
        The experts of this rank, for one or several `MoeLayer`.

    Raises:
        ConfigError: There is no class, or there are two.
        PlanError: The ranks over which experts are sharded do not divide their number, or these cannot be stacked.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import Experts
        >>> Experts(torch.nn.Linear, 4, in_features=8, out_features=8).weight.shape
        torch.Size([4, 8, 8])
    """
    superseded("colossal.nn.layer.moe", _SUCCESSOR)
    if (expert is None) == (expert_cls is None):
        raise ConfigError(f"Experts have one class. Found expert={expert}, expert_cls={expert_cls}. Pass one of them.")
    build = cast("Callable[..., nn.Module]", expert or expert_cls)
    return _shard(StackedExperts(build(**expert_args) for _ in range(num_experts)))


def FFNExperts(  # noqa: N802 (the name of a class in the older documentation)
    num_experts: int, d_model: int, d_ff: int, activation: Activation | None = None, drop_rate: float = 0.0
) -> nn.Module:
    """Build experts of two linear layers with biases, of which each rank keeps some.

    Args:
        num_experts: The number of experts on all ranks.
        d_model: The width of tokens.
        d_ff: The width between the layers.
        activation: The function between them; by default GELU.
        drop_rate: The probability of dropout between them.

    Returns:
        The experts of this rank.

    Raises:
        PlanError: The ranks over which experts are sharded do not divide their number.

    Example:
        >>> from colossal.legacy.moe import FFNExperts
        >>> FFNExperts(4, d_model=8, d_ff=16).up_proj.shape
        torch.Size([4, 16, 8])
    """
    superseded("colossal.nn.layer.moe", _SUCCESSOR)
    chosen = functional.gelu if activation is None else activation
    options: dict[str, Any] = {"gated": False, "bias": True, "dropout": drop_rate}
    return _shard(FeedForwardExperts(num_experts, d_model, d_ff, activation=chosen, **options))


class MoeLayer(nn.Module):
    """Sends tokens to experts, and adds the auxiliary loss of balancing to `MOE_CONTEXT`, in training.

    Args:
        dim_model: The width of tokens.
        num_experts: The number of experts on all ranks.
        router: Settings such as those of `Top2Router`; the layer has weights of its own.
        experts: What `Experts`, `FFNExperts` or `TPExperts` returned, or a `BaseExperts`; layers may share them.
        returns_loss: Return the auxiliary loss next to the output, and leave the context alone.

    Attributes:
        moe: The router of the layer and its experts.

    Raises:
        UnsupportedError: In a backward pass: reentrant activation checkpointing computes the layer again, so that the
            loss in the context has no gradient.

    Communication: all_to_all, ep, as of `colossal.nn.moe.dispatch` and `colossal.nn.moe.combine`.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import MOE_CONTEXT, FFNExperts, MoeLayer, Top1Router
        >>> MOE_CONTEXT.reset_loss()
        >>> layer = MoeLayer(dim_model=8, num_experts=4, router=Top1Router(), experts=FFNExperts(4, 8, 16))
        >>> layer(torch.randn(2, 3, 8)).shape, bool(MOE_CONTEXT.get_loss() > 0)
        (torch.Size([2, 3, 8]), True)
    """

    def __init__(
        self, dim_model: int, num_experts: int, router: TopKRouter, experts: nn.Module, returns_loss: bool = False
    ) -> None:
        super().__init__()
        if isinstance(experts, BaseExperts):
            experts = pad_experts(experts, num_experts, ambient_mesh())
        self.moe = MixtureOfExperts(router.build(dim_model, num_experts), experts)
        self.returns_loss = returns_loss

    def forward(self, inputs: torch.Tensor) -> Any:
        """Route tokens to experts.

        Args:
            inputs: Of shape (..., D).

        Returns:
            The results, of the same shape; with `returns_loss` the auxiliary loss too.

        Raises:
            UnsupportedError: Reentrant activation checkpointing computes it in training, without `returns_loss`.
        """
        output, routing = cast("tuple[torch.Tensor, Routing]", self.moe(inputs))
        if self.returns_loss:
            return output, routing.aux_loss
        if self.training:
            if routing.aux_loss.requires_grad and drops_graph():
                raise UnsupportedError(
                    "The auxiliary loss that a MoeLayer adds to MOE_CONTEXT belongs to the graph of its forward pass. "
                    "Found that this pass built none, and that activation checkpointing computes the layer again. Pass "
                    "use_reentrant=False to the checkpoint function, or returns_loss=True to MoeLayer and return the "
                    "loss from what is checkpointed."
                )
            MOE_CONTEXT.add_loss(routing.aux_loss)
        return output


class MoeModule(nn.Module):
    """A `MoeLayer` with its router and experts, and a dense module next to it if asked for.

    Args:
        dim_model: The width of tokens.
        num_experts: The number of experts on all ranks.
        top_k: The number of experts of a token.
        capacity_factor_train: The factor of the capacity in training.
        capacity_factor_eval: The factor in evaluation.
        min_capacity: The least that an expert takes.
        noisy_policy: `Jitter` or `Gaussian` noise in training; by default none.
        drop_tks: Whether tokens are dropped in evaluation too.
        use_residual: Add a dense module, both weighted by a softmax.
        residual_instance: That module; by default one more of `expert_cls`.
        expert_instance: What `Experts` or `FFNExperts` returned.
        expert_cls: The class of an expert, where there is no `expert_instance`.
        **expert_args: Its arguments.

    Attributes:
        moe_layer: The layer of experts.
        residual: The dense module; None without one.
        residual_mix: What weighs both.

    Raises:
        ConfigError: There are no experts, or the noise is unknown.

    Communication: all_to_all, ep, as of `colossal.nn.moe.dispatch` and `colossal.nn.moe.combine`.

    Source: Rajbhandari et al., "DeepSpeed-MoE", 2022, https://arxiv.org/abs/2201.05596, for the dense module.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import MoeModule
        >>> linear = {"in_features": 8, "out_features": 8}
        >>> layer = MoeModule(8, 4, top_k=2, use_residual=True, expert_cls=torch.nn.Linear, **linear)
        >>> layer(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        dim_model: int,
        num_experts: int,
        top_k: int = 1,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_policy: Literal["Jitter", "Gaussian"] | None = None,
        drop_tks: bool = True,
        use_residual: bool = False,
        residual_instance: nn.Module | None = None,
        expert_instance: nn.Module | None = None,
        expert_cls: Callable[..., nn.Module] | None = None,
        **expert_args: Any,
    ) -> None:
        super().__init__()
        if expert_instance is None and expert_cls is None:
            raise ConfigError("Experts are given, or have a class. Found neither. Pass expert_instance or expert_cls.")
        experts = expert_instance or Experts(expert_cls, num_experts, **expert_args)
        noise = make_noise(noisy_policy, num_experts)
        factors = (capacity_factor_train, capacity_factor_eval, min_capacity)
        router = TopKRouter(*factors, noisy_func=noise, drop_tks=drop_tks, top_k=top_k)
        self.moe_layer = MoeLayer(dim_model, num_experts, router, experts)
        self.residual: nn.Module | None = None
        if use_residual:
            self.residual = residual_instance or (None if expert_cls is None else expert_cls(**expert_args))
            if self.residual is None:
                raise ConfigError("The dense module has a class. Found none. Pass residual_instance or expert_cls.")
            self.residual_mix = nn.Linear(dim_model, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Route tokens to experts.

        Args:
            inputs: Of shape (..., D).

        Returns:
            The results, of the same shape.
        """
        output: torch.Tensor = self.moe_layer(inputs)
        if self.residual is None:
            return output
        mixed = self.residual_mix(inputs).softmax(-1)
        return output * mixed[..., :1] + self.residual(inputs) * mixed[..., 1:]


def make_noise(policy: str | None, num_experts: int) -> NoiseFunction | None:
    """Make noise by its older name."""
    if policy not in (None, "Jitter", "Gaussian"):
        raise ConfigError(f"Noise is 'Jitter' or 'Gaussian'. Found {policy!r}. Pass one of these, or None.")
    if policy is None:
        return None
    return UniformNoiseGenerator() if policy == "Jitter" else NormalNoiseGenerator(num_experts)


def _shard(experts: nn.Module) -> nn.Module:
    mesh = ambient_mesh()
    return experts if mesh is None else shard_experts(experts, mesh)
