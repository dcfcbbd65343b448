"""From a model to its chunks."""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.amp import cast_model, castable_parameters
from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.comm import Partition
from colossal._src.interface import check_dense_gradients, check_unwritten_weights
from colossal._src.tensor import (
    broadcast_values,
    copy_placement,
    local_of,
    operators_of,
    placement_of,
)
from colossal._src.zero.gemini.chunk import Chunk
from colossal._src.zero.gemini.chunk_manager import ChunkManager
from colossal._src.zero.gemini.chunk_search import (
    ParameterOrder,
    ordered_parameters,
    pack_parameters,
    search_chunk_configuration,
    unshared_parameters,
)
from colossal._src.zero.gemini.device_memory import DeviceMemory
from colossal._src.zero.gemini.gemini_config import GeminiConfig
from colossal._src.zero.gemini.managed_parameter import ManagedParameter, manage_parameters
from colossal._src.zero.gemini.tensor_state import ChunkPlacement, MemoryTier
from colossal._src.zero.gemini.transfer_log import TransferLog
from colossal._src.zero.zero_config import ZeroConfig
from colossal.errors import ConfigError

_DEFAULT_STEP = 1024

DeviceLike = torch.device | str | int | None
PartitionOf = Callable[[nn.Parameter], Partition]


def build_chunks(
    model: nn.Module,
    partition: Partition,
    partition_of: PartitionOf,
    config: GeminiConfig,
    gradients: ZeroConfig,
    device: torch.device,
    dtype: torch.dtype | None = None,
    memstats: ParameterOrder | None = None,
    scatter_after_inference: bool = True,
) -> ChunkManager:
    """Put the parameters of a model into chunks, one parameter after the other; all ranks get those of the first.

    `partition_of` says over which ranks each parameter is partitioned; all ranks of `partition` agree on what they use.

    Communication: broadcast, dp, the model's bytes.
    """
    check_chunkable(model)
    memory, traffic = _memory(partition, config, device), TransferLog()
    half, chunks = set() if dtype is None else set(castable_parameters(model)), list[Chunk]()
    for run, chunk_placement in _plan(model, partition, partition_of, config, memory, memstats, half):
        own = dtype if run[0] in half else None
        chunks.append(Chunk(run, partition_of(run[0]), gradients, memory, traffic, chunk_placement, own, len(chunks)))
        _fill(chunks[-1], device)
    memory.expect(max((chunk.num_bytes for chunk in chunks), default=0))
    _place_buffers(model, device, dtype)
    ahead, placement = config.max_prefetch, config.placement
    manager = ChunkManager(chunks, partition, memory, placement, traffic, ahead, scatter_after_inference)
    manage_parameters(model.parameters(), manager)
    return manager


def check_devices(device: torch.device, wanted: DeviceLike = None, chunk_init_device: DeviceLike = None) -> None:
    """Refuse to compute, or to build chunks, elsewhere than on the device of the ranks."""
    own = None if wanted is None else torch.device(wanted)
    if own is not None and (own.type != device.type or own.index not in (None, device.index)):
        raise ConfigError(
            f"A model computes on the device of its rank, which colossal.launch chose. Found device={str(own)!r} for a "
            f"rank on {device}. Leave it out; to compute elsewhere, launch for another device."
        )
    if chunk_init_device is not None and torch.device(chunk_init_device).type != device.type:
        raise ConfigError(
            "Chunks are filled parameter by parameter where the model computes, and kept where the placement policy "
            f"says. Found chunk_init_device={str(chunk_init_device)!r} for {device}. Leave it out; "
            "offload_param_frac=1.0 keeps parameters in host memory."
        )


def check_replicas(model: nn.Module, partition: Partition, mesh: ParallelMesh) -> None:
    """Refuse to shard parameters over ranks that hold different shards of them already."""
    ranks = set(dist.get_process_group_ranks(partition.group))
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter)
        if not placement.is_compute_sharded or set(placement.layout.ranks) <= set(mesh.ranks("ep")):
            continue  # experts are partitioned over the ranks of edp
        if len(ranks & {*placement.layout.ranks}) > 1:
            raise ConfigError(
                "Chunks are sharded over ranks that hold replicas. Found that the ranks "
                f"{sorted(ranks)} hold different shards of {name}, which is sharded over {placement.layout.ranks}. "
                f"Enter the mesh of the model first, such as {mesh}, and let the booster be made inside."
            )


def check_chunkable(model: nn.Module) -> None:
    """Raise an error for a model that chunks cannot hold."""
    from colossal._src.lazy import LazyTensor

    for name, parameter in model.named_parameters():
        if isinstance(parameter, ManagedParameter):
            raise ConfigError(
                f"A model is put into chunks once. Found that {name} is in one already. Wrap or boost it once."
            )
        is_known = type(parameter) is nn.Parameter or operators_of(parameter) is not None
        plain = is_known and type(parameter.data) is torch.Tensor and not parameter.is_meta
        if not (plain or isinstance(parameter, LazyTensor)) or not parameter.is_floating_point():
            raise ConfigError(
                "Chunks hold plain floating-point parameters that have values or were built lazily. Found "
                f"{name}: {type(parameter).__name__} in {parameter.dtype} on {parameter.device}. Build the model on a "
                "real device, or inside of LazyInitContext; make integers, as quantized values are, a buffer."
            )
    check_dense_gradients(model, "Gemini")
    check_unwritten_weights(model, "Gemini")


def _memory(partition: Partition, config: GeminiConfig, device: torch.device) -> DeviceMemory:
    return DeviceMemory(
        device,
        config.budget_on(device),
        config.pin_memory and device.type != "cpu",  # only copies to another device are faster from such memory
        counts_lingering=partition.world_size == 1,
        directory=config.nvme_offload_dir,
    )


def _plan(
    model: nn.Module,
    partition: Partition,
    partition_of: PartitionOf,
    config: GeminiConfig,
    memory: DeviceMemory,
    memstats: ParameterOrder | None,
    half: AbstractSet[nn.Parameter],
) -> Iterable[tuple[list[nn.Parameter], ChunkPlacement]]:
    """Return the parameters of each chunk, and its placement."""
    runs, stay_full = _runs(model, partition, partition_of, config, memstats, half)
    placements = config.placement.place_chunks([sum(each.numel() for each in run) for run in runs], memory)
    if stay_full:
        placements = [
            ChunkPlacement(MemoryTier.DEVICE, chunk_placement.optimizer, is_full=True) for chunk_placement in placements
        ]
    return zip(runs, placements, strict=True)


def _runs(
    model: nn.Module,
    partition: Partition,
    partition_of: PartitionOf,
    config: GeminiConfig,
    memstats: ParameterOrder | None,
    half: AbstractSet[nn.Parameter],
) -> tuple[list[list[nn.Parameter]], bool]:
    """Return the parameters of each chunk, and whether the configuration keeps all of them full."""
    if next(model.parameters(), None) is None:
        return [], False
    if config.chunk_config_dict is None:
        step = config.hidden_dim or _DEFAULT_STEP
        found, *_ = search_chunk_configuration(
            model,
            config.search_range_m,
            step,
            config.min_chunk_size_m,
            strict_ddp_flag=config.strict_ddp_mode,
            process_group=partition.group,
            memstas=memstats,
            verbose=config.verbose,
        )
    else:
        found = config.chunk_config_dict
    if partition.size not in found or "chunk_size" not in found[partition.size]:
        raise ConfigError(
            'chunk_config_dict has {"chunk_size": elements} for the number of ranks that share parameters. Found '
            f"{dict(found)} for {partition.size} ranks. Add an entry, or leave it out to have the size searched for."
        )
    own = found[partition.size]
    size = int(own["chunk_size"])
    order: Sequence[nn.Parameter] = ordered_parameters(model, memstats)
    separate, runs = unshared_parameters(model, size), list[list[nn.Parameter]]()
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in order:  # a chunk has one type: parameters next to running statistics stay in their own
        kinds.setdefault((partition_of(parameter), parameter in half), []).append(parameter)
    for members in kinds.values():
        runs.extend(pack_parameters(members, size, separate=separate))
    position = {parameter: index for index, parameter in enumerate(order)}
    return sorted(runs, key=lambda run: position[run[0]]), bool(own.get("keep_gathered", False))


def _fill(chunk: Chunk, device: torch.device) -> None:
    """Copy the first rank's values of each parameter into a chunk.

    [Note: one parameter at a time] A parameter that was built lazily is materialized just before it is sharded, and the
    full tensor is freed before the next one is materialized. So no rank ever has more than its shards and one full
    parameter.
    """
    from colossal._src.lazy import LazyTensor

    for index, parameter in enumerate(chunk.parameters):
        if isinstance(parameter, LazyTensor):
            parameter.materialize()
        values = local_of(parameter).detach().to(device).contiguous()
        broadcast_values([copy_placement(values, parameter)], current_mesh())
        chunk.load_values(index, values)
        # else this parameter would stay in memory while the next one is materialized
        del values


def _place_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Give values to buffers that were built lazily, bring all to the device, and cast those that checkpoints hold."""
    from colossal._src.lazy import materialize

    materialize(model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))
    broadcast_values(model.buffers(), current_mesh())
    if dtype is not None:
        cast_model(model, dtype, parameters=())
