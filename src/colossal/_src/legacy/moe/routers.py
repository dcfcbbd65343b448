"""Routers by their older names: settings, of which each layer builds a router of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from colossal._src.nn.moe import Capacity, GaussianNoise, Router, RouterLosses, UniformNoise

NoiseFunction = Callable[[torch.Tensor], torch.Tensor]


def NormalNoiseGenerator(num_experts: int) -> GaussianNoise:  # noqa: N802 (the name of a class in the older documentation)
    """Make noise of a normal distribution, with the standard deviation 1 / E.

    Args:
        num_experts: The number of experts, E.

    Returns:
        A function of logits.

    Example:
        >>> from colossal.legacy.moe import NormalNoiseGenerator
        >>> NormalNoiseGenerator(4).std
        0.25
    """
    return GaussianNoise(1.0 / num_experts)


def UniformNoiseGenerator(eps: float = 1e-2) -> UniformNoise:  # noqa: N802 (the name of a class in the older documentation)
    """Make noise that multiplies logits by numbers close to 1.

    Args:
        eps: By how much they differ from 1 at most.

    Returns:
        A function of logits.

    Example:
        >>> from colossal.legacy.moe import UniformNoiseGenerator
        >>> UniformNoiseGenerator().eps
        0.01
    """
    return UniformNoise(eps)


@dataclass(frozen=True)
class TopKRouter:
    """The settings of a router; `MoeLayer` builds its own of them, with weights of its own.

    Args:
        capacity_factor_train: The factor of the capacity in training.
        capacity_factor_eval: The factor in evaluation.
        min_capacity: The least that an expert takes.
        select_policy: Keep the first tokens of those that are too many, or random ones.
        noisy_func: What changes logits in training.
        drop_tks: Whether tokens are dropped in evaluation too.
        top_k: The number of experts of a token.

    Example:
        >>> from colossal.legacy.moe import TopKRouter
        >>> TopKRouter(top_k=3).build(8, 4).top_k
        3
    """

    capacity_factor_train: float = 1.25
    capacity_factor_eval: float = 2.0
    min_capacity: int = 4
    select_policy: Literal["first", "random"] = "first"
    noisy_func: NoiseFunction | None = None
    drop_tks: bool = True
    top_k: int = 1

    def build(self, dim_model: int, num_experts: int) -> Router:
        """Build the router of a layer.

        Args:
            dim_model: The width of tokens.
            num_experts: The number of experts.

        Returns:
            The router.

        Communication: with noise or random selection, broadcast, tp, 5 KB of the state of the random numbers.
        """
        router = Router(
            dim_model,
            num_experts,
            self.top_k,
            capacity=Capacity(
                train=self.capacity_factor_train,
                eval=self.capacity_factor_eval if self.drop_tks else None,
                minimum=self.min_capacity,
                keep=self.select_policy,
            ),
            noise=self.noisy_func,
            losses=RouterLosses(aux_weight=1.0),
        )
        nn.init.trunc_normal_(router.weight, std=(0.1 / dim_model) ** 0.5)
        return router


@dataclass(frozen=True)
class Top1Router(TopKRouter):
    """A router to one expert for each token, as of Switch Transformers.

    Args:
        capacity_factor_train: The factor of the capacity in training.
        capacity_factor_eval: The factor in evaluation.
        min_capacity: The least that an expert takes.
        select_policy: Keep the first tokens of those that are too many, or random ones.
        noisy_func: What changes logits in training.
        drop_tks: Whether tokens are dropped in evaluation too.
        top_k: The number of experts of a token.

    Example:
        >>> from colossal.legacy.moe import Top1Router
        >>> Top1Router(1.0, select_policy="random").build(8, 4).capacity.keep
        'random'
    """


@dataclass(frozen=True, init=False)
class Top2Router(TopKRouter):
    """A router to two experts for each token, as of GShard.

    Args:
        capacity_factor_train: The factor of the capacity in training.
        capacity_factor_eval: The factor in evaluation.
        min_capacity: The least that an expert takes.
        noisy_func: What changes logits in training.
        drop_tks: Whether tokens are dropped in evaluation too.
        select_policy: Keep the first tokens of those that are too many, or random ones.
        top_k: The number of experts of a token.

    Example:
        >>> from colossal.legacy.moe import NormalNoiseGenerator, Top2Router
        >>> Top2Router(1.2, noisy_func=NormalNoiseGenerator(4)).build(8, 4).top_k
        2
    """

    def __init__(
        self,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_func: NoiseFunction | None = None,
        drop_tks: bool = True,
        select_policy: Literal["first", "random"] = "first",
        top_k: int = 2,
    ) -> None:
        capacity = capacity_factor_train, capacity_factor_eval, min_capacity
        super().__init__(*capacity, select_policy, noisy_func, drop_tks, top_k)
