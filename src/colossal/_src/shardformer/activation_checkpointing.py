"""Activation checkpointing of some layers of a model: what they store in the forward pass is computed again."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from colossal._src.tensor import ParallelPlan, base_model_of, unwrap_adapters
from colossal.errors import ConfigError, UnsupportedError


@final
@dataclass(frozen=True)
class GradientCheckpointConfig:
    """Checkpoint a part of the layers.

    Args:
        gradient_checkpointing_ratio: The part of the layers of a stage that is checkpointed, its first ones; between 0
            and 1, and rounded down to full layers.

    Raises:
        ConfigError: The ratio is outside its range.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174.

    Example:
        >>> from colossal.shardformer import GradientCheckpointConfig
        >>> GradientCheckpointConfig(0.5).num_layers(7)
        3
    """

    gradient_checkpointing_ratio: float = 0.0

    def __post_init__(self) -> None:
        _check_ratio(self.gradient_checkpointing_ratio)

    def num_layers(self, held: int, stage: int = 0, num_stages: int = 1) -> int:  # noqa: ARG002 (the same for all stages)
        """Count the layers of a stage that are checkpointed.

        Args:
            held: How many layers it has.
            stage: Its index.
            num_stages: How many stages there are.

        Returns:
            The number, of its first layers.
        """
        return _part(self.gradient_checkpointing_ratio, held)


@final
@dataclass(frozen=True)
class PipelineGradientCheckpointConfig:
    """Checkpoint a part of the layers of each stage of a pipeline, or another number of layers on each.

    Early stages hold activations of more micro-batches than late ones, so they gain more.

    Args:
        gradient_checkpointing_ratio: The part of the layers of each stage, between 0 and 1, rounded down; it does not
            count where numbers are given.
        num_ckpt_layers_per_stage: For each stage, in their order and over all chunks of all ranks, how many of its
            first layers are checkpointed.

    Raises:
        ConfigError: The ratio is outside its range, or a number is below 0.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174.

    Example:
        >>> from colossal.shardformer import PipelineGradientCheckpointConfig
        >>> config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[3, 0])
        >>> [config.num_layers(4, stage, num_stages=2) for stage in range(2)]
        [3, 0]
    """

    gradient_checkpointing_ratio: float = 0.0
    num_ckpt_layers_per_stage: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check_ratio(self.gradient_checkpointing_ratio)
        if self.num_ckpt_layers_per_stage is not None and any(each < 0 for each in self.num_ckpt_layers_per_stage):
            raise ConfigError(
                "num_ckpt_layers_per_stage has numbers of layers, 0 or more. Found "
                f"{list(self.num_ckpt_layers_per_stage)}. Pass 0 for a stage that checkpoints nothing."
            )

    def num_layers(self, held: int, stage: int = 0, num_stages: int = 1) -> int:
        """Count the layers of a stage that are checkpointed.

        Args:
            held: How many layers it has.
            stage: Its index.
            num_stages: How many stages there are.

        Returns:
            The number, of its first layers.

        Raises:
            ConfigError: There is not one number for each stage, or a stage has fewer layers.
        """
        numbers = self.num_ckpt_layers_per_stage
        if numbers is None:
            return _part(self.gradient_checkpointing_ratio, held)
        if len(numbers) != num_stages or numbers[stage] > held:
            raise ConfigError(
                f"num_ckpt_layers_per_stage has a number for each of {num_stages} stages, none above the layers that "
                f"the stage has. Found {list(numbers)}, where stage {stage} has {held} layers. With several chunks on "
                "each rank, stages are counted over all."
            )
        return numbers[stage]


def check_checkpointing(model: nn.Module, plan: ParallelPlan | None) -> list[nn.Module]:
    """Find the layers of a model that can be checkpointed."""
    if plan is None or plan.stages is None:
        raise UnsupportedError(
            "gradient_checkpoint_config counts the layers that the stages of a plan name. Found "
            f"{type(model).__name__}, whose plan has no stages. Call model.activation_checkpointing_enable() before, "
            "or pass a ParallelPlan with stages."
        )
    here = dict(base_model_of(model).named_modules())
    lists = [here[each.layers] for each in plan.stages.lists if each.layers in here]
    return [layer for held in lists for layer in held.children()]


def checkpoint_layers(
    model: nn.Module,
    plan: ParallelPlan | None,
    config: GradientCheckpointConfig | PipelineGradientCheckpointConfig,
    stage: int = 0,
    num_stages: int = 1,
) -> None:
    """Checkpoint the first layers that a stage has. Random numbers are drawn again as they were.

    Layers of Hugging Face have a switch for it each; the calls of others are wrapped.
    """
    held: list[Any] = [each for each in check_checkpointing(model, plan) if _has_parameters(each)]
    for layer in held[: config.num_layers(len(held), stage, num_stages)]:
        if hasattr(layer, "gradient_checkpointing"):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = _recompute  # noqa: SLF001 (the switch of transformers)
        else:
            layer.forward = _Recompute(layer)


def switch_checkpointing(model: nn.Module, enabled: bool) -> None:
    """Let all layers of a model of Hugging Face be checkpointed or not, as its own method does, in any schedule."""
    if not getattr(unwrap_adapters(model), "supports_gradient_checkpointing", False):
        raise UnsupportedError(
            "activation_checkpointing_enable turns a switch that layers of Hugging Face have. Found "
            f"{type(model).__name__}, which has none. Pass gradient_checkpoint_config=GradientCheckpointConfig(1.0) to "
            "the plugin."
        )
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    for layer in layers:
        layer.gradient_checkpointing = enabled
        layer._gradient_checkpointing_func = _recompute  # noqa: SLF001 (as above)


@final
class _Recompute:
    """Calls the forward method of a layer, and once more in the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The forward method of the instance is this object, which would call itself.
        forward = partial(type(self._layer).forward, self._layer)
        if not (self._layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return _recompute(forward, *args, **kwargs)


def _recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, context_fn=_restored_function_modes, **kwargs)


def _restored_function_modes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Let what intercepts calls of torch, as a zero-bubble pipeline does, intercept those that are made again."""
    return nullcontext(), _entered(_get_current_function_mode_stack())


@contextmanager
def _entered(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            # A backward pass may run inside of the mode, which would then intercept each call twice.
            if mode not in _get_current_function_mode_stack():
                stack.enter_context(mode)
        yield


def _has_parameters(layer: nn.Module) -> bool:
    """Whether a layer is on this rank: those of other stages are placeholders without parameters."""
    return next(layer.parameters(), None) is not None


def _part(ratio: float, held: int) -> int:
    return math.floor(ratio * held + 1e-9)  # 0.7 * 10 is 7


def _check_ratio(ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ConfigError(
            f"gradient_checkpointing_ratio is between 0 and 1. Found {ratio}. Pass the part of the layers that is "
            "to be computed again."
        )
