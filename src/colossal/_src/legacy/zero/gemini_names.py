"""Gemini by the names of its first releases: the manager of chunks and the wrapped model, each made by itself."""

from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.legacy.notice import superseded
from colossal._src.legacy.zero.chunk_names import ChunkManagerSettings
from colossal._src.zero.gemini import (
    GeminiDDP,
    GeminiOptimizer,
    ParameterOrder,
)
from colossal.accelerator import get_current_device
from colossal.errors import UnsupportedError

_IN_HOST_MEMORY = ("cpu", "const")


@final
class GeminiManager:
    """Where chunks are kept: what `ZeroDDP` takes.

    Args:
        placement_policy: ``"static"``, ``"cuda"``, ``"cpu"``, ``"const"`` or ``"auto"``, as of `GeminiDDP`.
        chunk_manager: How parameters are put into chunks.
        memstats: Knows the order in which the parameters are used; that of ``model.parameters()`` by default.
        **placement_kwargs: Fractions of the policy, under their names as arguments of `GeminiDDP`.

    Attributes:
        placement_policy: The policy.
        chunk_manager: How parameters are put into chunks.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import GeminiManager, ZeroDDP, init_chunk_manager
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     linear = torch.nn.Linear(4, 3)
        ...     manager = GeminiManager("cpu", init_chunk_manager(linear))
        ...     model = ZeroDDP(linear, manager)
        >>> type(model).__name__
        'GeminiDDP'
    """

    def __init__(
        self,
        placement_policy: str,
        chunk_manager: ChunkManagerSettings,
        memstats: ParameterOrder | None = None,
        **placement_kwargs: Any,
    ) -> None:
        self.placement_policy, self.chunk_manager = placement_policy, chunk_manager
        self._memstats, self._placement = memstats, placement_kwargs

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `GeminiDDP` that say the same."""
        return {
            "chunk_config_dict": self.chunk_manager.configuration,
            "zero_group": self.chunk_manager.process_group,
            "placement_policy": self.placement_policy,
            "memstats": self._memstats,
            **({"max_prefetch": self.chunk_manager.max_prefetch} if self.chunk_manager.max_prefetch else {}),
            **({"fp8_communication": True} if self.chunk_manager.fp8_communication else {}),
            **self._placement,
        }

    @staticmethod
    def get_default_device(placement_policy: str) -> torch.device:
        """Return where chunks are between their uses.

        Args:
            placement_policy: The policy.

        Returns:
            The host for ``"cpu"`` and ``"const"``, else the device of this rank.
        """
        return torch.device("cpu") if placement_policy in _IN_HOST_MEMORY else get_current_device()


def ZeroDDP(  # noqa: N802 (the documented name)
    module: nn.Module,
    gemini_manager: GeminiManager,
    pin_memory: bool = False,
    force_outputs_fp32: bool = False,
    strict_ddp_mode: bool = False,
    scatter_after_inference: bool = True,
    mixed_precision: torch.dtype | None = torch.float16,
) -> GeminiDDP:
    """Wrap a model whose chunks and placement are given by a manager.

    Args:
        module: The model.
        gemini_manager: How parameters are put into chunks, and where these are kept.
        pin_memory: Page-lock the host memory of chunks.
        force_outputs_fp32: Cast floating-point outputs to float32.
        strict_ddp_mode: Keep full parameters on all ranks.
        scatter_after_inference: Release all chunks after a forward pass without gradients.
        mixed_precision: What the model is cast to; None leaves its types.

    Returns:
        The wrapped model.

    Raises:
        ConfigError: A value is outside its range.
        UnsupportedError: A parameter or module of the model is not supported.

    Communication: that of `GeminiDDP`.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import ChunkManager, GeminiManager, ZeroDDP
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     model = ZeroDDP(torch.nn.Linear(4, 3), GeminiManager("cuda", ChunkManager(64)), mixed_precision=None)
        >>> type(model).__name__
        'GeminiDDP'
    """
    superseded("colossal.zero.ZeroDDP", "Booster(plugin=GeminiPlugin(...)).boost(model, optimizer)")
    return GeminiDDP(
        module,
        pin_memory=pin_memory,
        force_outputs_fp32=force_outputs_fp32,
        strict_ddp_mode=strict_ddp_mode,
        scatter_after_inference=scatter_after_inference,
        mixed_precision=mixed_precision,
        **gemini_manager.arguments,
    )


def ZeroOptimizer(  # noqa: N802 (the documented name)
    optim: Optimizer,
    module: GeminiDDP,
    gpu_margin_mem_ratio: float = 0.0,
    initial_scale: float = 2**32,
    min_scale: float = 1,
    growth_factor: float = 2,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    max_scale: float = 2**32,
    clipping_norm: float = 0.0,
    norm_type: float = 2.0,
) -> GeminiOptimizer:
    """Make the optimizer of a wrapped model: `GeminiOptimizer` with the older defaults.

    Args:
        optim: An optimizer of the model's parameters, which treats elements one by one; changed in place.
        module: What `ZeroDDP` or `GeminiDDP` returned.
        gpu_margin_mem_ratio: As of `colossal.zero.gemini.GeminiOptimizer`.
        initial_scale: First loss scale, where the model computes in float16.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without an overflow after which the scale grows.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        clipping_norm: Clip the common norm of the gradients to it before each step; 0 does not.
        norm_type: The p of that norm.

    Returns:
        The optimizer.

    Raises:
        ConfigError: A value is outside its range.
        UnsupportedError: The optimizer looks at more than one element at once.

    Communication: none when it is made; that of a step is the model's.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import ChunkManager, GeminiManager, ZeroDDP, ZeroOptimizer
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     model = ZeroDDP(torch.nn.Linear(4, 3), GeminiManager("cuda", ChunkManager(64)))
        ...     optimizer = ZeroOptimizer(torch.optim.AdamW(model.parameters()), model)
        >>> optimizer.scaler.scale_value == 2**32
        True
    """
    return GeminiOptimizer(
        optim, module, gpu_margin_mem_ratio, initial_scale, min_scale, growth_factor, backoff_factor, growth_interval,
        hysteresis, max_scale, clipping_norm, norm_type,
    )  # fmt: skip


@final
class StatefulTensorMgr:
    """A part of the first releases, which has no counterpart.

    Args:
        *args: Anything; it raises.
        **kwargs: Anything; it raises.

    Raises:
        UnsupportedError: Always; says what to use.

    Example:
        >>> from colossal.errors import UnsupportedError
        >>> from colossal.legacy.zero import StatefulTensorMgr
        >>> try:
        ...     StatefulTensorMgr()
        ... except UnsupportedError as error:
        ...     print(str(error).partition(". ")[0])
        The states of parameters are kept by the chunks of a wrapped model
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(
            "The states of parameters are kept by the chunks of a wrapped model",
            "StatefulTensorMgr",
            "colossal.zero.gemini.GeminiDDP(model, placement_policy='auto'); TensorState lists the states, and "
            "DeviceMemory counts the bytes",
            *args,
            **kwargs,
        )


@final
class MemStatsCollector:
    """A part of the first releases, which has no counterpart.

    Args:
        *args: Anything; it raises.
        **kwargs: Anything; it raises.

    Raises:
        UnsupportedError: Always; says what to use.

    Example:
        >>> from colossal.errors import UnsupportedError
        >>> from colossal.legacy.zero import MemStatsCollector
        >>> try:
        ...     MemStatsCollector()
        ... except UnsupportedError as error:
        ...     print(str(error).partition(". ")[0])
        The first pass of a wrapped model records what it uses
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(
            "The first pass of a wrapped model records what it uses",
            "MemStatsCollector",
            "colossal.zero.gemini.GeminiDDP(model, placement_policy='auto'); AccessTrace has the order and the peaks",
            *args,
            **kwargs,
        )


def _refuse(required: str, name: str, instead: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise UnsupportedError(f"{required}. Found a call of {name}, which has no counterpart. Use {instead}.")
