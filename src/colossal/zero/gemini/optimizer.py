"""Optimizers that update the shards of chunks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossal.amp import DynamicScaler, LossScaler, ScalerConfig
from colossal.errors import ConfigError
from colossal.interface import OptimizerWrapper, check_optimizer
from colossal.zero.config import ZeroConfig
from colossal.zero.gemini.chunk import Chunk
from colossal.zero.gemini.chunks import ChunkManager
from colossal.zero.gemini.module import GeminiDDP
from colossal.zero.gemini.tiers import Tier
from colossal.zero.shards import ZeroShards

_USUAL_STATES = 2


def shard_over_chunks(
    optimizer: Optimizer,
    chunks: ChunkManager,
    config: ZeroConfig,
    names: dict[Any, str],
    scaler: LossScaler | None = None,
    max_norm: float = 0.0,
    norm_type: float = 2.0,
) -> OptimizerWrapper:
    """Let an optimizer update this rank's shards of parameters that lie in chunks.

    Args:
        optimizer: Of parameters of the model; changed in place.
        chunks: Where they lie.
        config: How gradients travel.
        names: The name of each parameter.
        scaler: The loss scaler; none by default.
        max_norm: Clip the common norm of the gradients to it before each step; 0 does not.
        norm_type: The p of that norm.

    Returns:
        The optimizer, wrapped.

    Raises:
        ConfigError: A parameter is not the model's, or the device has no room for the optimizer.
        UnsupportedError: The optimizer looks at more than one element at once.

    Example:
        >>> import torch
        >>> from colossal.testing import fake_world
        >>> from colossal.zero import ZeroConfig
        >>> from colossal.zero.gemini import GeminiDDP
        >>> from colossal.zero.gemini.optimizer import shard_over_chunks
        >>> with fake_world(2):
        ...     model = GeminiDDP(torch.nn.Linear(4, 1), mixed_precision=None)
        ...     adam = torch.optim.AdamW(model.parameters())
        ...     optimizer = shard_over_chunks(adam, model.chunks, ZeroConfig(stage=2), {})
        >>> [tuple(shard.shape) for shard in optimizer.parameters]
        [(3,), (0,)]
    """
    check_optimizer(optimizer, shards=True)
    order = [parameter for chunk in chunks.chunks for parameter in chunk.parameters]
    shards = ZeroShards(
        optimizer, order, chunks.partition, config, chunks=partial(_chunks_of, chunks), agree=chunks.agree
    )
    _Footprint(optimizer, chunks)
    return OptimizerWrapper(optimizer, scaler, names, shards, max_norm, norm_type)


class GeminiOptimizer(OptimizerWrapper):
    """An optimizer of a `GeminiDDP`: each rank updates its shards of the parameters.

    Args:
        optim: Any optimizer that treats elements one by one, of the model's parameters; changed in place.
        module: The wrapped model.
        gpu_margin_mem_ratio: Accepted for 0 only: the optimizer's part stays where the placement policy puts it.
        initial_scale: First loss scale; greater than 0. The loss is scaled if the model computes in float16.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after overflows; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        max_norm: Clip the common norm of the gradients to it before each step; 0 does not.
        norm_type: The p of that norm.
        verbose: Log each change of the loss scale on rank 0.

    Raises:
        ConfigError: A value is outside its range, or a parameter is not the model's.
        UnsupportedError: The optimizer looks at more than one element at once.

    Communication: none when it is made; that of a step is the model's.

    Example:
        >>> import torch
        >>> from colossal.testing import fake_world
        >>> from colossal.zero.gemini import GeminiDDP, GeminiOptimizer
        >>> with fake_world(2):
        ...     model = GeminiDDP(torch.nn.Linear(4, 3, bias=False))
        ...     optimizer = GeminiOptimizer(torch.optim.AdamW(model.parameters()), model, initial_scale=8)
        >>> [(shard.dtype, tuple(shard.shape)) for shard in optimizer.parameters]
        [(torch.float32, (6,))]
    """

    def __init__(
        self,
        optim: Optimizer,
        module: GeminiDDP,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        verbose: bool = False,
    ) -> None:
        check_margin(gpu_margin_mem_ratio)
        rule = ScalerConfig(
            initial_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
        )
        device = module.chunks.memory.device
        scaler = DynamicScaler(rule, device.type, verbose=verbose) if module.dtype == torch.float16 else None
        names = {parameter: name for name, parameter in module.module.named_parameters()}
        made = shard_over_chunks(optim, module.chunks, module.gradients, names, scaler, max_norm, norm_type)
        super().__init__(optim, scaler, names, made.masters, max_norm, norm_type)


class GeminiAdamOptimizer(GeminiOptimizer):
    """`colossal.nn.optimizer.HybridAdam` as the optimizer of a `GeminiDDP`.

    Args:
        model: The wrapped model.
        **defaults: Arguments of `HybridAdam`, such as ``lr``, and of `GeminiOptimizer`, such as ``max_norm``.

    Example:
        >>> import torch
        >>> from colossal.testing import fake_world
        >>> from colossal.zero.gemini import GeminiAdamOptimizer, GeminiDDP
        >>> with fake_world(2):
        ...     model = GeminiDDP(torch.nn.Linear(4, 3), mixed_precision=None)
        ...     optimizer = GeminiAdamOptimizer(model, lr=1e-3, max_norm=1.0)
        >>> type(optimizer.unwrap()).__name__
        'HybridAdam'
    """

    def __init__(self, model: GeminiDDP, **defaults: Any) -> None:
        import inspect

        from colossal.nn.optimizer import HybridAdam

        known = inspect.signature(GeminiOptimizer).parameters
        own = {name: defaults.pop(name) for name in list(defaults) if name in known}
        super().__init__(HybridAdam(model.parameters(), **defaults), model, **own)


def _chunks_of(chunks: ChunkManager, parameters: Sequence[nn.Parameter]) -> list[Chunk]:
    for parameter in parameters:
        if not chunks.knows(parameter):
            raise ConfigError(
                "The optimizer updates parameters of the model that lies in chunks. Found another one, of the shape "
                f"{tuple(parameter.shape)}. Build the optimizer of the model's own parameters."
            )
    return chunks.of_parameters(parameters)


def check_margin(ratio: float) -> None:
    """Refuse a share of the device for the optimizer that nothing would honour.

    Args:
        ratio: The share.

    Raises:
        ConfigError: It is not 0.

    Example:
        >>> from colossal.zero.gemini.optimizer import check_margin
        >>> check_margin(0.0)
    """
    if ratio != 0:
        raise ConfigError(
            "Under the auto policy the optimizer is in host memory. Found "
            f"gpu_margin_mem_ratio={ratio}. Pass placement_policy='static' with an offload_optim_frac below 1."
        )


class _Footprint:
    """Accounts for the states that an optimizer has on the device: as two of float32 until they are there."""

    def __init__(self, optimizer: Optimizer, chunks: ChunkManager) -> None:
        self._optimizer, self._memory = optimizer, chunks.memory
        self._chunks = [chunk for chunk in chunks.chunks if chunk.home.optimizer is Tier.DEVICE and chunk.trains]
        self._num_bytes = sum(4 * _USUAL_STATES * _owned(chunk, optimizer) for chunk in self._chunks)
        if self._num_bytes:
            self._memory.add("optimizer", self._num_bytes)
            optimizer.register_step_post_hook(self._measure)

    def _measure(self, *_step: Any) -> None:
        state: Any = self._optimizer.state
        entries = [state.get(shard, {}) for chunk in self._chunks for shard in chunk.shards]
        tensors = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
        now = sum(tensor.nbytes for tensor in tensors if tensor.dim())
        self._memory.add("optimizer", now - self._num_bytes)
        self._num_bytes = now


def _owned(chunk: Chunk, optimizer: Optimizer) -> int:
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return sum(shard.numel() for shard in chunk.shards if id(shard) in held)
