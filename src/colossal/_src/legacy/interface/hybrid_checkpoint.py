"""Checkpoints of models that are distributed in several ways, by the older constructor."""

import math

from torch import distributed as dist

from colossal._src.checkpoint_io import CheckpointIO, ProcessGroupIO
from colossal._src.legacy.notice import superseded
from colossal.errors import ConfigError


def HybridParallelCheckpointIO(  # noqa: N802 (the documented name)
    dp_group: dist.ProcessGroup,
    pp_group: dist.ProcessGroup,
    tp_group: dist.ProcessGroup,
    sp_group: dist.ProcessGroup | None = None,
    zero_stage: int = 0,
    verbose: bool = True,  # noqa: ARG001 (there is nothing more to say)
) -> CheckpointIO:
    """Make what saves and loads boosted models with all ranks.

    Superseded by ``plugin.get_checkpoint_io()``, and by the methods of `Booster`, which use it.

    Args:
        dp_group: The replicas of this rank.
        pp_group: The ranks of its pipeline.
        tp_group: The ranks that shard its tensors.
        sp_group: The ranks that shard its sequences, if they are others.
        zero_stage: Accepted for programs that pass it: boosted optimizers know how they are sharded.
        verbose: Accepted for programs that pass it.

    Returns:
        A `colossal.checkpoint_io.CheckpointIO` of all ranks; saving and loading are collective.

    Raises:
        ConfigError: The groups are not those of a grid of all ranks, or there is no such stage of ZeRO.

    Example:
        >>> from colossal.legacy.cluster import ProcessGroupMesh
        >>> from colossal.legacy.interface import HybridParallelCheckpointIO
        >>> from colossal.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = ProcessGroupMesh(2, 2, 1)
        ...     made = HybridParallelCheckpointIO(*(mesh.get_group_along_axis(axis) for axis in range(3)))
        >>> type(made).__name__
        'CheckpointIO'
    """
    superseded("HybridParallelCheckpointIO", "booster.save_model(...) and booster.load_model(...)")
    sizes = [dist.get_world_size(group) for group in (dp_group, pp_group, tp_group)]
    if sp_group is not None and sp_group is not tp_group:
        sizes.append(dist.get_world_size(sp_group))
    if math.prod(sizes) != dist.get_world_size() or zero_stage not in range(4):
        raise ConfigError(
            f"All ranks save a checkpoint together, a grid of dp, pp, tp and sp. Found groups of {sizes} ranks in a "
            f"world of {dist.get_world_size()}, and zero_stage={zero_stage}. Pass the groups of one mesh of all ranks; "
            "for some of them, CheckpointIO(ProcessGroupIO(group))."
        )
    return CheckpointIO(ProcessGroupIO())


def MoECheckpointIO(  # noqa: N802 (the documented name)
    global_dp_group: dist.ProcessGroup,
    pp_group: dist.ProcessGroup,
    tp_group: dist.ProcessGroup,
    sp_group: dist.ProcessGroup | None = None,
    ep_group: dist.ProcessGroup | None = None,
    moe_dp_group: dist.ProcessGroup | None = None,
    zero_stage: int = 0,
    verbose: bool = True,
) -> CheckpointIO:
    """Make what saves and loads boosted mixtures of experts with all ranks: files have all experts, in their order.

    Superseded by ``plugin.get_checkpoint_io()``, and by the methods of `Booster`, which use it.

    Args:
        global_dp_group: The replicas of this rank, of what is no expert.
        pp_group: The ranks of its pipeline.
        tp_group: The ranks that shard its tensors.
        sp_group: The ranks that shard its sequences, if they are others.
        ep_group: The ranks that have other experts; parameters know it themselves.
        moe_dp_group: The ranks that have the same experts.
        zero_stage: Accepted for programs that pass it: boosted optimizers know how they are sharded.
        verbose: Accepted for programs that pass it.

    Returns:
        A `colossal.checkpoint_io.CheckpointIO` of all ranks; saving and loading are collective.

    Raises:
        ConfigError: The groups are not those of a grid of all ranks, or there is no such stage of ZeRO.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.interface import MoECheckpointIO
        >>> from colossal.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = ParallelMesh(ep=2)
        ...     made = MoECheckpointIO(*(mesh.group(axis) for axis in ("dp", "pp", "tp", "sp", "ep", "edp")))
        >>> type(made).__name__
        'CheckpointIO'
    """
    groups = [group for group in (ep_group, moe_dp_group) if group is not None]
    sizes = [dist.get_world_size(group) for group in groups]
    experts = dist.get_world_size() // dist.get_world_size(pp_group)
    if len(sizes) > 1 and math.prod(sizes) != experts:
        raise ConfigError(
            f"Ranks that have other experts, and those that have the same, are a grid of the {experts} ranks of a "
            f"stage. Found ep_group and moe_dp_group of {sizes} ranks. Pass those of one mesh: mesh.group('ep') and "
            "mesh.group('edp')."
        )
    return HybridParallelCheckpointIO(global_dp_group, pp_group, tp_group, sp_group, zero_stage, verbose)
