"""Gemini by the names of its first releases: chunks, their manager and the wrapped model, each made by itself."""

from collections.abc import Mapping
from typing import Any, NoReturn, final

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossal._src.legacy.notice import superseded
from colossal._src.zero.gemini import (
    GeminiDDP,
    GeminiOptimizer,
    ParameterOrder,
    search_chunk_configuration,
)
from colossal.accelerator import get_current_device
from colossal.errors import ConfigError, UnsupportedError

_MEBI = 1 << 20
_DEFAULT_STEP = 1024
_IN_HOST_MEMORY = ("cpu", "const")

DeviceName = torch.device | str | int | None


@final
class ChunkManagerSettings:
    """How parameters are put into chunks: what `ZeroDDP` takes from a chunk manager.

    The chunks themselves are made when the model is wrapped.

    Args:
        chunk_configuration: A number of elements for each chunk; or for numbers of ranks, ``{"chunk_size": elements,
            "keep_gathered": bool}``, as `search_chunk_configuration` returns it.
        process_group: The ranks over which chunks are sharded; those of the dp axis by default.
        enable_distributed_storage: With a number of elements: shard chunks, instead of keeping them on all ranks.
        init_device: Accepted for the host and the device of the ranks: parameters are put into chunks one by one, and
            the placement policy says where these are kept.
        reuse_fp16_chunk: Accepted as documented: gradients take the memory of chunks where they can.
        max_prefetch: As of `GeminiDDP`, which gets it.
        fp8_communication: As of `GeminiDDP`, which gets it.

    Raises:
        ConfigError: The number of elements is below 1.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import ChunkManagerSettings
        >>> model = torch.nn.Linear(100, 100)
        >>> ChunkManagerSettings(ChunkManagerSettings.search_chunk_size(model, 1024, 4)).configuration
        {1: {'chunk_size': 10256, 'keep_gathered': False}}
    """

    def __init__(
        self,
        chunk_configuration: int | Mapping[int, Mapping[str, Any]],
        process_group: dist.ProcessGroup | None = None,
        enable_distributed_storage: bool = True,
        init_device: DeviceName = None,
        reuse_fp16_chunk: bool = True,
        max_prefetch: int = 0,
        fp8_communication: bool = False,
    ) -> None:
        del reuse_fp16_chunk
        self.max_prefetch, self.fp8_communication = max_prefetch, fp8_communication
        if isinstance(chunk_configuration, int) and chunk_configuration < 1:
            raise ConfigError(
                f"A chunk has at least one element. Found a chunk size of {chunk_configuration}. Let "
                "ChunkManager.search_chunk_size find one."
            )
        _check_init_device(init_device)
        self.process_group = process_group
        self._sizes, self._is_sharded = chunk_configuration, enable_distributed_storage

    @property
    def configuration(self) -> dict[int, dict[str, Any]]:
        """For the number of ranks, the size of chunks and whether all ranks keep them."""
        if not isinstance(self._sizes, int):
            return {size: dict(each) for size, each in self._sizes.items()}
        ranks = dist.get_world_size(self.process_group) if dist.is_initialized() else 1
        return {ranks: {"chunk_size": self._sizes, "keep_gathered": not self._is_sharded}}

    @property
    def dp_degree_chunk_size_dict(self) -> dict[int, int]:
        """For the number of ranks, the size of chunks."""
        return {ranks: int(each["chunk_size"]) for ranks, each in self.configuration.items()}

    @staticmethod
    def search_chunk_size(
        model: nn.Module,
        search_range: int,
        n_grids: int,
        min_chunk_size: int | None = None,
        filter_exlarge_params: bool = True,
    ) -> int:
        """Find the chunk size that leaves the fewest elements empty.

        Args:
            model: Its parameters are to be put into chunks.
            search_range: How far above the smallest size is searched, in elements.
            n_grids: How many sizes are tried.
            min_chunk_size: The smallest size, in elements; none is smaller than the largest parameter.
            filter_exlarge_params: Choose the size without parameters that are much larger than the others.

        Returns:
            Elements.

        Raises:
            ConfigError: A number is outside its range, or the model has no parameters.
        """
        configuration, *_ = search_chunk_configuration(
            model,
            search_range / _MEBI,
            max(search_range // max(n_grids, 1), 1),
            (min_chunk_size or 0) / _MEBI,
            filter_exlarge_params,
        )
        (found,) = configuration.values()
        return int(found["chunk_size"])


ChunkManager = ChunkManagerSettings
"""`ChunkManagerSettings` under its documented name."""


def search_configuration_of_chunks(
    model: nn.Module,
    search_range_mb: float | None = None,
    search_interval_byte: int | None = None,
    min_chunk_size_mb: float = 32,
    filter_exlarge_params: bool = True,
    **options: Any,
) -> tuple[dict[int, dict[str, Any]], int, int]:
    """Search for the size of chunks; ``search_chunk_configuration`` of the older modules.

    Superseded by `colossal.zero.gemini.search_chunk_configuration`.

    Args:
        model: Its parameters are to be put into chunks.
        search_range_mb: How far above the smallest size is searched, in units of 2**20 elements.
        search_interval_byte: The distance of the sizes that are tried, in elements.
        min_chunk_size_mb: The smallest size, in units of 2**20 elements.
        filter_exlarge_params: Choose the size without parameters that are much larger than the others.
        **options: Those of `colossal.zero.gemini.search_chunk_configuration`, such as the newer names of these.

    Returns:
        What that returns.

    Raises:
        ConfigError: A number is outside its range, or the model has no parameters.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import search_configuration_of_chunks
        >>> model = torch.nn.Linear(100, 100)
        >>> search_configuration_of_chunks(model, search_range_mb=1, search_interval_byte=100)[0]
        {1: {'chunk_size': 10112, 'keep_gathered': False}}
    """
    older = {
        "search_range_m": search_range_mb,
        "search_interval": search_interval_byte,
        "min_chunk_size_m": min_chunk_size_mb,
        "filter_exlarge_params": filter_exlarge_params,
    }
    return search_chunk_configuration(model, **{**{k: v for k, v in older.items() if v is not None}, **options})


def init_chunk_manager(
    model: nn.Module,
    init_device: DeviceName = None,
    hidden_dim: int | None = None,
    search_range_mb: float = 32,
    min_chunk_size_mb: float = 32,
    filter_exlarge_params: bool = True,
    verbose: bool = False,
    process_group: dist.ProcessGroup | None = None,
    *,
    search_range_m: float | None = None,
    search_interval: int | None = None,
    min_chunk_size_m: float | None = None,
    strict_ddp_flag: bool = False,
) -> ChunkManagerSettings:
    """Search for the size of chunks.

    Args:
        model: Its parameters are to be put into chunks.
        init_device: Accepted for the host and the device of the ranks; see `ChunkManagerSettings`.
        hidden_dim: The distance of the sizes that are tried, in elements; 1024 by default.
        search_range_mb: How far above the smallest size is searched, in units of 2**20 elements.
        min_chunk_size_mb: The smallest size, in units of 2**20 elements.
        filter_exlarge_params: Choose the size without parameters that are much larger than the others.
        verbose: Log on rank 0 what is used and wasted.
        process_group: The ranks over which chunks are sharded; all by default.
        search_range_m: The newer name of `search_range_mb`.
        search_interval: The distance of the sizes that are tried, in elements, where `hidden_dim` is not given.
        min_chunk_size_m: The newer name of `min_chunk_size_mb`.
        strict_ddp_flag: Keep full chunks on every rank.

    Returns:
        What `GeminiManager` takes.

    Raises:
        ConfigError: A number is outside its range, or the model has no parameters.

    Example:
        >>> import torch
        >>> from colossal.legacy.zero import init_chunk_manager
        >>> init_chunk_manager(torch.nn.Linear(100, 100), hidden_dim=100).configuration
        {1: {'chunk_size': 10112, 'keep_gathered': False}}
    """
    configuration, *_ = search_chunk_configuration(
        model,
        search_range_mb if search_range_m is None else search_range_m,
        hidden_dim or search_interval or _DEFAULT_STEP,
        min_chunk_size_mb if min_chunk_size_m is None else min_chunk_size_m,
        filter_exlarge_params,
        strict_ddp_flag,
        process_group=process_group,
        verbose=verbose,
    )
    return ChunkManagerSettings(configuration, process_group, init_device=init_device)


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


def _check_init_device(device: DeviceName) -> None:
    own = get_current_device()
    if device is not None and torch.device(device).type not in ("cpu", own.type):
        raise ConfigError(
            f"Chunks are on the device of the ranks or in host memory. Found init_device={str(device)!r} for a rank on "
            f"{own}. Leave it out; the placement policy says where chunks are kept."
        )
