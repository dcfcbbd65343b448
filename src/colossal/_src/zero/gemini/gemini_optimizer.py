"""Optimizers that update the shards of chunks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.amp import DynamicScaler, ScalerConfig
from colossal._src.interface import Clipping, Keywords, OptimizerWrapper, check_optimizer, keywords_for, unwrap_model
from colossal._src.zero.gemini.chunk import Chunk
from colossal._src.zero.gemini.chunk_manager import ChunkManager
from colossal._src.zero.gemini.gemini_ddp import GeminiDDP
from colossal._src.zero.gemini.tensor_state import MemoryTier
from colossal._src.zero.zero_config import ZeroConfig
from colossal._src.zero.zero_shards import ZeroShards
from colossal.errors import ConfigError

# the two moments of Adam
_USUAL_STATES = 2


def shard_optimizer_over_chunks(optimizer: Optimizer, chunks: ChunkManager, config: ZeroConfig) -> ZeroShards:
    """Let an optimizer update this rank's shards of parameters that are in chunks."""
    check_optimizer(optimizer, shards=True)
    order = [parameter for chunk in chunks.chunks for parameter in chunk.parameters]
    shards = ZeroShards(
        optimizer,
        order,
        lambda _: chunks.partition,
        config,
        chunks=partial(_chunks_of, chunks),
        agree=chunks.agree,
        reserve=None if chunks.memory.budget is None else partial(chunks.eviction.reserve, kind="gradients"),
    )
    _account_for_states(optimizer, chunks)
    return shards


class GeminiOptimizer(OptimizerWrapper):
    """An optimizer of a `GeminiDDP`: each rank updates its shards of the parameters.

    Args:
        optim: Any optimizer that treats elements one by one, of the model's parameters; changed in place.
        module: The wrapped model.
        gpu_margin_mem_ratio: Fulfilled where the placement policy keeps all of the optimizer on the device; else
            accepted for 0 only.
        initial_scale: First loss scale; greater than 0. The loss is scaled if the model computes in float16.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after overflows; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        max_norm: Clip the common norm of the gradients to it before each step; 0 does not.
        norm_type: The p of that norm.
        tp_group: Accepted as documented: parameters know which ranks shard them.
        params_info: Accepted.
        verbose: Log each change of the loss scale on rank 0.

    Raises:
        ConfigError: A value is outside its range, or a parameter is not the model's.
        UnsupportedError: The optimizer looks at more than one element at once, or `gpu_margin_mem_ratio` is not 0
            and the optimizer is not on the device.

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
        tp_group: Any = None,
        params_info: Any = None,
        verbose: bool = False,
    ) -> None:
        del tp_group, params_info
        given, chunks, scaler = dict(locals()), module.chunks.chunks, None
        is_on_device = all(chunk.placement.optimizer is MemoryTier.DEVICE for chunk in chunks)
        keywords = Keywords("GeminiOptimizer", given, ("gpu_margin_mem_ratio",) if is_on_device else ())
        rule, clipping = keywords.read(ScalerConfig), keywords.read(Clipping)
        if module.dtype == torch.float16:
            device_type = module.chunks.memory.device.type
            scaler = DynamicScaler(rule, device_type, verbose, unscale_fp16_grads=not module.master_weights)
        names = {parameter: name for name, parameter in unwrap_model(module).named_parameters()}
        shards = shard_optimizer_over_chunks(optim, module.chunks, module.gradients)
        super().__init__(optim, scaler, names, shards, clipping.max_norm, clipping.norm_type)
        module.set_optimizer(self)


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
        from colossal._src.nn.optimizer import HybridAdam

        own = keywords_for(GeminiOptimizer, defaults)
        others = {name: value for name, value in defaults.items() if name not in own}
        super().__init__(HybridAdam(model.parameters(), **others), model, **own)


def _chunks_of(chunks: ChunkManager, parameters: Sequence[nn.Parameter]) -> list[Chunk]:
    for parameter in parameters:
        if not chunks.has_parameter(parameter):
            raise ConfigError(
                "The optimizer updates parameters of the model that is in chunks. Found another one, of the shape "
                f"{tuple(parameter.shape)}. Build the optimizer of the model's own parameters."
            )
    return chunks.chunks_of(parameters)


def _account_for_states(optimizer: Optimizer, chunks: ChunkManager) -> None:
    """Account for the states that an optimizer has on the device: as two of float32 until they are there."""
    on_device = [chunk for chunk in chunks.chunks if chunk.placement.optimizer is MemoryTier.DEVICE and chunk.trains]
    counted = sum(4 * _USUAL_STATES * _owned(chunk, optimizer) for chunk in on_device)

    def measure(optimizer: Optimizer, *_step: Any) -> None:
        nonlocal counted
        state: Any = optimizer.state
        entries = [state.get(shard, {}) for chunk in on_device for shard in chunk.shards]
        tensors = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
        now = sum(tensor.nbytes for tensor in tensors if tensor.dim())
        chunks.eviction.account("optimizer", now - counted)
        counted = now

    if counted:
        chunks.eviction.account("optimizer", counted)
        optimizer.register_step_post_hook(measure)


def _owned(chunk: Chunk, optimizer: Optimizer) -> int:
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return sum(shard.numel() for shard in chunk.shards if id(shard) in held)
