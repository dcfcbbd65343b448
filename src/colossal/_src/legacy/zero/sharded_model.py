"""ZeRO-3 by the names of the first config files: a sharded model and its optimizer, which Gemini carries out."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossal._src.interface import check_known
from colossal._src.lazy import LazyInitContext
from colossal._src.legacy.notice import superseded
from colossal._src.zero.gemini import GeminiDDP, GeminiOptimizer
from colossal.errors import ConfigError, UnsupportedError


class BaseShardStrategy:
    """How the parameters of a `ShardedModelV2` are laid out; results do not depend on it.

    Example:
        >>> from colossal.legacy.zero import BaseShardStrategy, TensorShardStrategy
        >>> isinstance(TensorShardStrategy(), BaseShardStrategy)
        True
    """


@final
class TensorShardStrategy(BaseShardStrategy):
    """Shards each parameter by itself: chunks are as small as the largest parameter allows.

    Attributes:
        chunk_options: The arguments of `GeminiDDP` that say so.

    Example:
        >>> from colossal.legacy.zero import TensorShardStrategy
        >>> TensorShardStrategy().chunk_options["min_chunk_size_m"]
        0
    """

    chunk_options: Mapping[str, Any] = {"min_chunk_size_m": 0, "search_range_m": 0}


@final
class BucketTensorShardStrategy(BaseShardStrategy):
    """Shards several parameters together: chunks of the default size.

    Attributes:
        chunk_options: The arguments of `GeminiDDP` that say so: none.

    Example:
        >>> from colossal.legacy.zero import BucketTensorShardStrategy
        >>> BucketTensorShardStrategy().chunk_options
        {}
    """

    chunk_options: Mapping[str, Any] = {}


def ZeroInitContext(  # noqa: N802 (the documented name)
    target_device: torch.device | str | None = None,
    shard_strategy: BaseShardStrategy | None = None,
    shard_param: bool = False,
    default_dtype: torch.dtype | None = None,
) -> LazyInitContext:
    """Build a model without memory; its parameters get their values when it is sharded, one after the other.

    Args:
        target_device: Where its tensors are to be; the current default by default.
        shard_strategy: Accepted as documented: `ShardedModelV2` takes it.
        shard_param: Accepted as documented; parameters take no memory before they are sharded in any case.
        default_dtype: Accepted for None only.

    Returns:
        A context manager.

    Raises:
        UnsupportedError: There is a `default_dtype`.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import ZeroInitContext
        >>> with ZeroInitContext("cpu"):
        ...     model = torch.nn.Linear(3, 2)
        >>> type(model.weight).__name__
        'LazyTensor'
    """
    _strategy_options(shard_strategy)
    superseded("colossal.zero.init_ctx.ZeroInitContext", "LazyInitContext()")
    del shard_param
    if default_dtype is not None:
        raise UnsupportedError(
            "A model is built in the dtype that torch.set_default_dtype sets, and cast when it is sharded. Found "
            f"default_dtype={default_dtype}. Leave it out, or set torch's."
        )
    return LazyInitContext(default_device=target_device)


def ShardedModelV2(  # noqa: N802 (the documented name)
    module: nn.Module,
    shard_strategy: BaseShardStrategy | None = None,
    process_group: dist.ProcessGroup | None = None,
    reduce_scatter_process_group: dist.ProcessGroup | None = None,
    reduce_scatter_bucket_size_mb: int = 25,
    fp32_reduce_scatter: bool = False,
    tensor_placement_policy: str = "cuda",
    gradient_predivide_factor: float = 1.0,
    reuse_fp16_shard: bool = False,
) -> GeminiDDP:
    """Wrap a model whose parameters are sharded over the data-parallel ranks, and that computes in float16.

    Args:
        module: The model, also one of a `ZeroInitContext`.
        shard_strategy: `TensorShardStrategy` or `BucketTensorShardStrategy`; the latter by default.
        process_group: The ranks over which parameters are sharded; those of the dp axis by default.
        reduce_scatter_process_group: Accepted for None and `process_group`.
        reduce_scatter_bucket_size_mb: Accepted for 25, the default: gradients are reduced chunk by chunk.
        fp32_reduce_scatter: Accepted for False: gradients are summed in the dtype of the model.
        tensor_placement_policy: ``"cuda"``, ``"cpu"`` or ``"auto"``, as of `GeminiDDP`.
        gradient_predivide_factor: Accepted for 1: gradients are averaged after they are summed.
        reuse_fp16_shard: Accepted as documented: memory of gradients is reused in any case.

    Returns:
        The wrapped model.

    Raises:
        ConfigError: A value is outside its range.
        UnsupportedError: An option, or a parameter or module of the model, is not supported.

    Communication: that of `GeminiDDP`.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import ShardedModelV2, TensorShardStrategy
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     model = ShardedModelV2(torch.nn.Linear(4, 3), TensorShardStrategy(), tensor_placement_policy="cpu")
        >>> type(model).__name__
        'GeminiDDP'
    """
    del reuse_fp16_shard
    superseded("colossal.zero.ShardedModelV2", "Booster(plugin=GeminiPlugin(...)).boost(model, optimizer)")
    chunk_options = _strategy_options(shard_strategy)
    fixed = {
        "reduce_scatter_process_group": (reduce_scatter_process_group, (None, process_group)),
        "reduce_scatter_bucket_size_mb": (reduce_scatter_bucket_size_mb, (25,)),
        "fp32_reduce_scatter": (fp32_reduce_scatter, (False,)),
        "gradient_predivide_factor": (gradient_predivide_factor, (1.0,)),
    }
    for name, (value, accepted) in fixed.items():
        if value not in accepted:
            raise UnsupportedError(
                "Gradients are summed chunk by chunk over the ranks that shard them, in the dtype of the model. Found "
                f"{name}={value}, which is not supported. Leave it out; LowLevelZeroPlugin(communication_dtype=...) "
                "sums in another dtype."
            )
    return GeminiDDP(module, placement_policy=tensor_placement_policy, zero_group=process_group, **chunk_options)


def ShardedOptimizerV2(  # noqa: N802 (the documented name)
    sharded_model: GeminiDDP,
    optimizer: Optimizer,
    gpu_margin_mem_ratio: float = 0.0,
    initial_scale: float = 2**32,
    min_scale: float = 1,
    growth_factor: float = 2,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: float = 2,
    max_scale: float = 2**32,
    verbose: bool = False,
) -> GeminiOptimizer:
    """Make the optimizer of a sharded model: `GeminiOptimizer` with the older order and defaults.

    Args:
        sharded_model: What `ShardedModelV2` returned.
        optimizer: An optimizer of its parameters, which treats elements one by one; changed in place.
        gpu_margin_mem_ratio: As of `colossal.zero.gemini.GeminiOptimizer`.
        initial_scale: First loss scale, where the model computes in float16.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without an overflow after which the scale grows.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        verbose: Log each change of the loss scale on rank 0.

    Returns:
        The optimizer.

    Raises:
        ConfigError: A value is outside its range.
        UnsupportedError: The optimizer looks at more than one element at once.

    Communication: none when it is made; that of a step is the model's.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import ShardedModelV2, ShardedOptimizerV2
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     model = ShardedModelV2(torch.nn.Linear(4, 3))
        ...     optimizer = ShardedOptimizerV2(model, torch.optim.AdamW(model.parameters()), initial_scale=8)
        >>> optimizer.scaler.scale_value
        8.0
    """
    return GeminiOptimizer(
        optimizer,
        sharded_model,
        gpu_margin_mem_ratio,
        initial_scale,
        min_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        int(hysteresis),
        max_scale,
        verbose=verbose,
    )


def convert_to_zero_v2(
    model: nn.Module,
    optimizer: Optimizer,
    model_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
) -> tuple[GeminiDDP, GeminiOptimizer]:
    """Shard a model and its optimizer: what ``zero=dict(model_config=..., optimizer_config=...)`` of a config means.

    Args:
        model: The model.
        optimizer: An optimizer of its parameters.
        model_config: Arguments of `ShardedModelV2`.
        optimizer_config: Arguments of `ShardedOptimizerV2`.

    Returns:
        The wrapped model and the optimizer.

    Raises:
        ConfigError: A value is outside its range, or there is no such option.
        UnsupportedError: An option is not supported.

    Communication: that of `GeminiDDP`.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import convert_to_zero_v2
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     model = torch.nn.Linear(4, 3)
        ...     model, optimizer = convert_to_zero_v2(model, torch.optim.AdamW(model.parameters()))
        >>> type(model).__name__, type(optimizer).__name__
        ('GeminiDDP', 'GeminiOptimizer')
    """
    model_options, optimizer_options = dict(model_config or {}), dict(optimizer_config or {})
    check_known("model_config", model_options, _options_of(ShardedModelV2))
    check_known("optimizer_config", optimizer_options, _options_of(ShardedOptimizerV2))
    wrapped = ShardedModelV2(model, **model_options)
    return wrapped, ShardedOptimizerV2(wrapped, optimizer, **optimizer_options)


def _options_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The keywords of a function that have defaults."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.default is not inspect.Parameter.empty)


def _strategy_options(strategy: BaseShardStrategy | None) -> dict[str, Any]:
    if strategy is None:
        return {}
    if not isinstance(strategy, TensorShardStrategy | BucketTensorShardStrategy):
        raise ConfigError(
            "A shard strategy is TensorShardStrategy() or BucketTensorShardStrategy(). Found "
            f"{strategy!r}. Pass one of them."
        )
    return dict(strategy.chunk_options)
