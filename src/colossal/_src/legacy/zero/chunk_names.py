"""Chunks of Gemini by the names of its first releases."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.zero.gemini import search_chunk_configuration
from colossal.accelerator import get_current_device
from colossal.errors import ConfigError

_MEBI = 1 << 20
_DEFAULT_STEP = 1024

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
    reuse_fp16_chunk: bool = True,
    max_prefetch: int = 0,
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
        reuse_fp16_chunk: As of `ChunkManagerSettings`.
        max_prefetch: As of `ChunkManagerSettings`.

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
    return ChunkManagerSettings(
        configuration,
        process_group,
        init_device=init_device,
        reuse_fp16_chunk=reuse_fp16_chunk,
        max_prefetch=max_prefetch,
    )


def _check_init_device(device: DeviceName) -> None:
    own = get_current_device()
    if device is not None and torch.device(device).type not in ("cpu", own.type):
        raise ConfigError(
            f"Chunks are on the device of the ranks or in host memory. Found init_device={str(device)!r} for a rank on "
            f"{own}. Leave it out; the placement policy says where chunks are kept."
        )
