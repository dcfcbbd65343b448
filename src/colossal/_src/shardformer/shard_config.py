"""What the user says about dividing a model, and about making it faster."""

from dataclasses import InitVar, dataclass, fields
from typing import Any, Literal, final, get_args

from torch import distributed as dist

from colossal._src._older_names import get_older_name
from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.nn.attention import SequenceSharding
from colossal._src.nn.moe import Exchange, check_exchange
from colossal._src.shardformer.activation_checkpointing import (
    GradientCheckpointConfig,
    PipelineGradientCheckpointConfig,
)
from colossal.errors import ConfigError

SequenceMode = Literal["split_gather", "ring", "all_to_all", "ring_attn"]
"""How sequences are sharded over ranks."""

MODES_OF_TP: tuple[SequenceMode, ...] = ("split_gather", "ring")
"""Modes in which sequences are sharded over the same axis as tensors."""


@final
@dataclass(frozen=True)
class SequenceParallelConfig:
    """A mode of sequence parallelism, and how tokens are sharded.

    Args:
        mode: The mode.
        sharding: Which rank has which tokens.
        inner_ring_size: Of ring_attn, see `colossal.nn.attention.ring_attention`.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.shardformer import SequenceParallelConfig
        >>> from colossal.testing import fake_world
        >>> with fake_world(4):
        ...     sp_config = SequenceParallelConfig.of(None, ParallelMesh(sp=4), None)
        >>> sp_config.mode, sp_config.sharding.size, sp_config.is_over_tp
        ('all_to_all', 4, False)
    """

    mode: SequenceMode
    sharding: SequenceSharding
    inner_ring_size: int | None = None

    @classmethod
    def of(
        cls, mode: SequenceMode | None, mesh: ParallelMesh, inner_ring_size: int | None
    ) -> "SequenceParallelConfig | None":
        """Check the options of the user.

        Args:
            mode: The mode; by default all_to_all if the sp axis has several ranks, else split_gather.
            mesh: The mesh.
            inner_ring_size: See `SequenceParallelConfig`.

        Returns:
            How sequences are sharded; None if the axis has one rank.

        Raises:
            ConfigError: There is no such mode, or the ranks are on the other axis.
        """
        mode = mode or ("all_to_all" if mesh.size("sp") > 1 else "split_gather")
        _check_mode(mode)
        axis, other = ("tp", "sp") if mode in MODES_OF_TP else ("sp", "tp")
        if mesh.size(axis) == 1 and mesh.size(other) > 1:
            raise ConfigError(
                f"In the mode {mode!r} sequences are sharded over the {axis} axis. Found {mesh}. Give that axis "
                f"several ranks, or choose a mode of the {other} axis."
            )
        if mode in MODES_OF_TP and mesh.size("sp") > 1:
            raise ConfigError(
                f"In the mode {mode!r} sequences are sharded over the tp axis only. Found {mesh}. "
                "Leave sp out, or choose all_to_all or ring_attn."
            )
        if inner_ring_size is not None and mode != "ring_attn":
            raise ConfigError(
                f"Only ring_attn has inner rings. Found inner_ring_size={inner_ring_size} in the mode {mode!r}. Leave "
                "it out."
            )
        sharding = SequenceSharding(mesh, axis, is_zigzag=mode == "ring_attn")
        return None if sharding.size == 1 else cls(mode, sharding, inner_ring_size)

    @property
    def is_over_tp(self) -> bool:
        """Whether sequences are sharded over the same axis as tensors."""
        return self.mode in MODES_OF_TP


@final
@dataclass(frozen=True)
class ShardConfig:
    """How a model is sharded, and what else is done to it. An option that a model does not support is an error.

    Args:
        mesh: The mesh whose tp axis shards the model, and whose ep axis shards its experts; the ambient one by default.
        enable_tensor_parallelism: Whether to shard the model over the tp axis; otherwise it stays replicated.
        parallel_output: Leave the logits of a causal language model sharded over the vocabulary, and compute its loss
            from them; other models, and those with a loss_function of the program, gather them. With sequences on the
            sp axis, tokens stay sharded as well.
        enable_flash_attention: Compute attention without storing its scores, by ``"flash_attention_2"`` where the
            package, the device, the dtype and the classes of the model allow it, and else by ``"sdpa"`` of torch.
        enable_fused_normalization: Compute norms in one kernel; those of torch, such as LayerNorm, are that already.
        enable_jit_fused: Compile activations of several operations, such as GPT-2's GELU, into one kernel. Biases and
            dropout around them are not fused: that would take other forward methods.
        enable_all_optimization: The three options above, as far as the model supports them; a line of the log says
            which, and why others are left out.
        gradient_checkpoint_config: How many layers compute their activations again in the backward pass.
        enable_sequence_parallelism: Whether to shard sequences over ranks.
        sequence_parallelism_mode: How: ``"split_gather"`` or ``"ring"`` for the ranks of the tp axis, ``"all_to_all"``
            or ``"ring_attn"`` for those of the sp axis. The default is all_to_all if that axis has several ranks, else
            split_gather.
        inner_ring_size: Of ring_attn: how many ranks first exchange keys in an inner ring.
        expert_exchange: How tokens come to experts that are sharded over the ep axis: ``"all_to_all"``, or
            ``"all_gather"``, which sends less where a token goes to more experts than the axis has ranks; by default
            as a layer of the model's own says, else all_to_all. See `colossal.nn.moe.shard_experts`.
        tensor_parallel_process_group: In place of the mesh, the ranks that shard tensors. As an attribute, those of the
            mesh; None without one.
        sequence_parallel_process_group: In place of the mesh, the ranks that shard sequences, where they are others. As
            an attribute, those of the mesh that do, or this rank alone; None without one.
        pipeline_stage_manager: Of a pipeline of one stage only; `HybridParallelPlugin` has others.
        make_vocab_size_divisible_by: Only 64, the default, or 1: nothing is padded, and any vocabulary is sharded.
        extra_kwargs: Only an empty one.
        sp_axis: Accepted as documented, as `pg_mesh`: the groups say it.
        pg_mesh: Accepted.
        moe_dp_group: In place of the mesh, the ranks that have the same experts.
        ep_group: In place of the mesh, the ranks that have different ones.
        fp8_communication: Only False.

    Raises:
        ConfigError: `gradient_checkpoint_config` or `expert_exchange` is something else, no mesh has these groups, or
            they are not those of the mesh that is given too.
        UnsupportedError: The pipeline has several stages, or an option cannot be honored.

    Example:
        >>> from colossal.shardformer import ShardConfig
        >>> ShardConfig().parallel_output
        True
    """

    mesh: ParallelMesh | None = None
    enable_tensor_parallelism: bool = True
    parallel_output: bool = True
    enable_flash_attention: bool = False
    enable_fused_normalization: bool = False
    enable_jit_fused: bool = False
    enable_all_optimization: bool = False
    gradient_checkpoint_config: GradientCheckpointConfig | PipelineGradientCheckpointConfig | None = None
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: SequenceMode | None = None
    inner_ring_size: int | None = None
    expert_exchange: Exchange | None = None
    tensor_parallel_process_group: InitVar[Any] = None
    sequence_parallel_process_group: InitVar[Any] = None
    pipeline_stage_manager: InitVar[Any] = None
    make_vocab_size_divisible_by: InitVar[int] = 64
    extra_kwargs: InitVar[Any] = None
    sp_axis: InitVar[Any] = None
    pg_mesh: InitVar[Any] = None
    moe_dp_group: InitVar[Any] = None
    ep_group: InitVar[Any] = None
    fp8_communication: InitVar[bool] = False

    def __post_init__(
        self,
        tensor_parallel_process_group: Any,
        sequence_parallel_process_group: Any,
        pipeline_stage_manager: Any,
        make_vocab_size_divisible_by: int,
        extra_kwargs: Any,
        sp_axis: Any,
        pg_mesh: Any,
        moe_dp_group: Any,
        ep_group: Any,
        fp8_communication: bool,
    ) -> None:
        del sp_axis, pg_mesh
        if self.sequence_parallelism_mode is not None:
            _check_mode(self.sequence_parallelism_mode)
        groups = (
            *self._other_groups(tensor_parallel_process_group, sequence_parallel_process_group),
            pipeline_stage_manager,
        )
        older: dict[str, Any] = {"moe_dp_group": moe_dp_group, "ep_group": ep_group, "extra_kwargs": extra_kwargs}
        older |= {"fp8_communication": fp8_communication or None}
        if make_vocab_size_divisible_by not in (1, 64):
            older["make_vocab_size_divisible_by"] = make_vocab_size_divisible_by
        older = {name: value for name, value in older.items() if value is not None}
        if older or any(each is not None for each in groups):
            of_groups: Any = get_older_name("colossal.shardformer.shard", "ShardConfig")
            options = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "mesh"}
            object.__setattr__(self, "mesh", of_groups(*groups, **options, **older).mesh)
        check_exchange(self.expert_exchange)
        config = self.gradient_checkpoint_config
        if config is not None and not isinstance(config, GradientCheckpointConfig | PipelineGradientCheckpointConfig):
            raise ConfigError(
                "gradient_checkpoint_config is a GradientCheckpointConfig or a PipelineGradientCheckpointConfig. Found "
                f"{config!r}. Pass one of them, such as GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)."
            )

    def _other_groups(self, tp: Any, sp: Any) -> tuple[Any, Any]:
        """Keep what says more than the mesh: `dataclasses.replace` passes the groups that the mesh has as well."""
        if self.mesh is None:
            return tp, sp
        tp_ranks, sp_ranks = self.mesh.ranks("tp"), self.mesh.ranks("sp")
        given = {
            "tensor_parallel_process_group": (tp, (tp_ranks,)),
            "sequence_parallel_process_group": (sp, (tp_ranks, sp_ranks)),
        }
        strange = [
            name
            for name, (group, own) in given.items()
            if group is not None and tuple(dist.get_process_group_ranks(group)) not in map(tuple, own)
        ]
        if strange:
            raise ConfigError(
                f"A configuration has a mesh, or groups of processes. Found {self.mesh} and {', '.join(strange)} of "
                "other ranks. Leave one of them out; with dataclasses.replace(config, mesh=...), pass None for both "
                "groups."
            )
        return None, None

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share a tensor: those of the tp axis of the mesh, by default of the ambient one."""
        return (self.mesh or current_mesh()).size("tp") if self.enable_tensor_parallelism else 1

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks over which a sequence is sharded; 1 if it is not."""
        sharing = self.sequence_parallel_config(self.mesh or current_mesh())
        return 1 if sharing is None else sharing.sharding.size

    @property
    def expert_parallel_size(self) -> int:
        """Ranks over which experts are sharded."""
        return (self.mesh or current_mesh()).size("ep")

    def shards_tensors(self, mesh: ParallelMesh) -> bool:
        """Tell whether layers are sharded over the tp axis of a mesh.

        Args:
            mesh: The mesh.

        Returns:
            Whether the axis has several ranks, and tensor parallelism is enabled.
        """
        return self.enable_tensor_parallelism and mesh.size("tp") > 1

    def sequence_parallel_config(self, mesh: ParallelMesh) -> SequenceParallelConfig | None:
        """Find how sequences are shared on a mesh.

        Args:
            mesh: The mesh.

        Returns:
            The mode and the ranks; None if sequences are not sharded.

        Raises:
            ConfigError: There is no such mode, or its ranks are on the other axis.
        """
        if self.enable_sequence_parallelism:
            return SequenceParallelConfig.of(self.sequence_parallelism_mode, mesh, self.inner_ring_size)
        if self.sequence_parallelism_mode is not None or mesh.size("sp") > 1:
            raise ConfigError(
                "Sequences are sharded where enable_sequence_parallelism=True. Found it False with "
                f"sequence_parallelism_mode={self.sequence_parallelism_mode!r} on {mesh}. Turn it on, or leave both "
                "out."
            )
        return None


def _check_mode(mode: str) -> None:
    if mode not in get_args(SequenceMode):
        names = ", ".join(map(repr, get_args(SequenceMode)))
        raise ConfigError(f"Sequences are sharded in one of the modes {names}. Found {mode!r}. Pass one of them.")


def _tensor_parallel_process_group(config: ShardConfig) -> dist.ProcessGroup | None:
    """The ranks that shard tensors; None where the configuration has no mesh."""
    return None if config.mesh is None else config.mesh.group("tp")


def _sequence_parallel_process_group(config: ShardConfig) -> dist.ProcessGroup | None:
    """The ranks that shard sequences, this one alone if none do; None where the configuration has no mesh."""
    if config.mesh is None:
        return None
    sharing = config.sequence_parallel_config(config.mesh) if config.enable_sequence_parallelism else None
    return config.mesh.group("sp" if sharing is None else sharing.sharding.axis)


# a policy reads them as attributes; in the class body they would be the defaults of the arguments of these names
setattr(ShardConfig, "tensor_parallel_process_group", property(_tensor_parallel_process_group))  # noqa: B010
setattr(ShardConfig, "sequence_parallel_process_group", property(_sequence_parallel_process_group))  # noqa: B010
