"""Options of sharding by process groups, for the mesh of today."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import distributed as dist

from colossal._src.cluster import Axis, ParallelMesh, ambient_mesh
from colossal._src.legacy.notice import superseded
from colossal._src.shardformer import ShardConfig
from colossal.errors import ConfigError, UnsupportedError

_OVER_SP = ("all_to_all", "ring_attn")
_READ_FROM_GROUPS = ("sp_axis", "pg_mesh")
_OF_EXPERTS: Mapping[str, Axis] = {"moe_dp_group": "edp", "ep_group": "ep"}


def shard_config_of_groups(
    tensor_parallel_process_group: dist.ProcessGroup | None = None,
    sequence_parallel_process_group: dist.ProcessGroup | None = None,
    pipeline_stage_manager: Any = None,
    **options: Any,
) -> ShardConfig:
    """Make the configuration of sharding from the documented arguments; ``ShardConfig`` of the older modules.

    Superseded by `colossal.shardformer.ShardConfig`, which takes a mesh.

    Args:
        tensor_parallel_process_group: The ranks that shard tensors; by default those of the ambient mesh, or all.
        sequence_parallel_process_group: The ranks that shard sequences, in the modes of other ranks than these.
        pipeline_stage_manager: Of a pipeline of one stage only.
        **options: Those of `colossal.shardformer.ShardConfig` in addition to its mesh;
            ``make_vocab_size_divisible_by`` of 64 or 1, as vocabularies are sharded whatever their length; ``sp_axis``
            and ``pg_mesh``, which the groups say; ``ep_group`` and ``moe_dp_group``, the ranks of experts.

    Returns:
        The configuration.

    Raises:
        ConfigError: A group is not one of a mesh of all ranks.
        UnsupportedError: An option cannot be honored.

    Example:
        >>> from colossal.legacy.cluster import ProcessGroupMesh
        >>> from colossal.legacy.interface import shard_config_of_groups
        >>> from colossal.testing import fake_world
        >>> with fake_world(4):
        ...     group = ProcessGroupMesh(2, 2).get_group_along_axis(1)
        ...     config = shard_config_of_groups(tensor_parallel_process_group=group)
        >>> config.mesh.size("tp"), config.mesh.size("dp")
        (2, 2)

    Communication: unless the ambient mesh has these groups, the ranks of a new mesh open connections.
    """
    superseded("ShardConfig(tensor_parallel_process_group=...)", "ShardConfig(mesh=ParallelMesh(tp=...))")
    passed = {each.name: options.pop(each.name) for each in fields(ShardConfig) if each.name in options}
    experts: dict[Axis, Any] = {axis: options.pop(name, None) for name, axis in _OF_EXPERTS.items()}
    _refuse(pipeline_stage_manager, options)
    shards_tensors = passed.get("enable_tensor_parallelism", True)
    over_sp = passed.get("enable_sequence_parallelism") and passed.get("sequence_parallelism_mode") in (None, *_OVER_SP)
    tp = tensor_parallel_process_group if shards_tensors else None
    mesh = _mesh_of(tp, sequence_parallel_process_group if over_sp else None, shards_tensors, experts)
    return ShardConfig(**{"mesh": mesh, **passed})


def _refuse(stage_manager: Any, options: Mapping[str, Any]) -> None:
    """Refuse what the configuration of today cannot say."""
    found = [name for name, value in options.items() if value and name not in _READ_FROM_GROUPS]
    if options.get("make_vocab_size_divisible_by") in (1, 64):
        found.remove("make_vocab_size_divisible_by")
    if stage_manager is not None and stage_manager.num_stages > 1:
        found.append("pipeline_stage_manager")
    if found:
        raise UnsupportedError(
            f"ShardConfig shards a model over tensors and sequences. Found {', '.join(found)}. For a pipeline, use "
            "HybridParallelPlugin(tp_size=..., pp_size=...); leave out the others."
        )


def _mesh_of(
    tp: dist.ProcessGroup | None,
    sp: dist.ProcessGroup | None,
    shards_tensors: bool,
    experts: Mapping[Axis, dist.ProcessGroup | None],
) -> ParallelMesh:
    """Find the mesh whose tp and sp axes are these groups, and those of experts."""
    mesh = ambient_mesh()
    groups: dict[Axis, dist.ProcessGroup | None] = {"tp": tp, "sp": sp, **experts}
    wanted: dict[Axis, list[int]] = {
        axis: dist.get_process_group_ranks(group) for axis, group in groups.items() if group is not None
    }
    if mesh is None or any(list(mesh.ranks(axis)) != ranks for axis, ranks in wanted.items()):
        everyone = dist.get_world_size() if shards_tensors and sp is None and "ep" not in wanted else 1
        sp_size, ep_size = len(wanted.get("sp", range(1))), len(wanted.get("ep", range(1)))
        mesh = ParallelMesh(tp=len(wanted.get("tp", range(everyone))), sp=sp_size, ep=ep_size)
    strange: dict[Axis, list[int]] = {axis: ranks for axis, ranks in wanted.items() if list(mesh.ranks(axis)) != ranks}
    if strange:
        raise ConfigError(
            f"Ranks that shard tensors, or experts, are adjacent, and those that shard sequences as far apart. Found "
            f"{strange}, and the ranks {[mesh.ranks(axis) for axis in strange]} of {mesh}. Make the groups of such a "
            "mesh, the axis of tensors last."
        )
    return mesh
