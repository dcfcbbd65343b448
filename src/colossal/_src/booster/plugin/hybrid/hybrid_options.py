"""The options of `HybridParallelPlugin`, checked and sorted."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from colossal._src.amp import ScalerConfig
from colossal._src.booster.plugin.ddp.torch_ddp import DDPConfig
from colossal._src.booster.plugin.zero_options import ZeroOptions
from colossal._src.cluster import Axis, ParallelMesh, ambient_mesh
from colossal._src.interface import Clipping, Keywords
from colossal._src.pipeline import (
    SCHEDULES,
    GivenSchedule,
    Microbatching,
    PipelineStyle,
    Schedule,
    StagePlacement,
)
from colossal._src.shardformer import MODES_OF_TP, ShardConfig, check_policy
from colossal._src.zero import ZeroConfig
from colossal.errors import ConfigError, UnsupportedError
from colossal.logging import get_dist_logger

_CHUNKS: Mapping[str, int | None] = {"1f1b": 1, "interleaved": None, "zbv": 2}


@final
@dataclass(frozen=True, kw_only=True)
class HybridOptions:
    """How the user shards a model; how states are partitioned over data-parallel ranks is in `ZeroOptions`."""

    tp_size: int  # ranks over which a tensor is sharded
    pp_size: int  # stages of the pipeline over which the layers are split
    sp_size: int  # ranks over which sequences are sharded, in addition to those of tp; 1 if those of tp do it
    ep_size: int  # ranks over which experts are sharded: those of dp, sp and tp
    zero_stage: int  # 0 for replicas, 1 to partition optimizer states, 2 gradients too
    dp_outside: bool  # number the ranks of one replica one after the other
    style: PipelineStyle  # the schedule of the pipeline
    num_chunks: int  # stages of each rank
    given_schedule: GivenSchedule | None  # an order of passes in place of the style's own
    num_layers_per_stage: tuple[int, ...] | None  # layers of each stage, in order; equal numbers by default
    microbatching: Microbatching | None  # how a batch is split into micro-batches; None without a pipeline
    sharding: ShardConfig  # what `ShardFormer` does, without a mesh yet
    caches: bool  # whether shapes of hidden states are sent once
    zero: ZeroOptions  # how states are partitioned over data-parallel ranks
    ddp: DDPConfig  # options of `DistributedDataParallel`

    def __post_init__(self) -> None:
        if min(self.tp_size, self.pp_size, self.sp_size, self.ep_size) < 1 or self.zero_stage not in (0, 1, 2):
            raise ConfigError(
                "tp_size, pp_size, sp_size and ep_size are at least 1, and zero_stage is 0, 1 or 2. Found tp_size="
                f"{self.tp_size}, pp_size={self.pp_size}, sp_size={self.sp_size}, ep_size={self.ep_size}, "
                f"zero_stage={self.zero_stage}. "
                "Pass 1 for a size without parallelism, and zero_stage=0 to partition nothing."
            )
        if self.sp_size > 1 and not self.sharding.enable_sequence_parallelism:
            raise ConfigError(
                f"Sequences are sharded where enable_sequence_parallelism=True. Found it False with sp_size="
                f"{self.sp_size}. Turn it on, or leave sp_size out."
            )
        if self.style not in _CHUNKS:
            raise ConfigError(
                f"A pipeline has a pp_style of {', '.join(map(repr, _CHUNKS))}. Found {self.style!r}. Pass one of them."
            )
        fitting, fitting_style = _CHUNKS[self.style], "1f1b" if self.num_chunks <= 1 else "interleaved"
        if self.pp_size > 1 and (self.num_chunks == 1 if fitting is None else self.num_chunks != fitting):
            raise ConfigError(
                f"pp_style={self.style!r} has {'2 chunks of the model or more' if fitting is None else fitting} on "
                f"each rank. Found num_model_chunks={self.num_chunks}. Pass num_model_chunks={fitting or 2}, or "
                f"pp_style={fitting_style!r}."
            )
        if self.pp_size > 1 and self.microbatching is None:
            raise ConfigError(
                "A pipeline splits a batch into micro-batches. Found neither num_microbatches nor microbatch_size with "
                f"pp_size={self.pp_size}. Pass one of them."
            )
        if self.pp_size > 1 and self.zero_stage == 2:  # noqa: PLR2004 (the stage of ZeRO)
            raise UnsupportedError(
                "ZeRO-2 reduces gradients in every backward pass, and a pipeline has one for each micro-batch, which "
                f"multiplies communication. Found zero_stage=2 with pp_size={self.pp_size}. The nearest that works is "
                "zero_stage=1."
            )
        if self.pp_size == 1 and (self.num_layers_per_stage, self.style, self.num_chunks) != (None, "1f1b", 1):
            raise ConfigError(
                "num_layers_per_stage, pp_style and num_model_chunks say how a model is split into stages, which takes "
                f"pp_size=2 or more. Found num_layers_per_stage={self.num_layers_per_stage}, pp_style={self.style!r}, "
                f"num_model_chunks={self.num_chunks} with pp_size=1. Leave them out, or raise pp_size."
            )
        if self.given_schedule is not None and self.microbatching is not None:
            self.given_schedule.check_number(self.microbatching.num_microbatches)
        self._reject_options_without_effect()

    def _reject_options_without_effect(self) -> None:
        """Reject options of ZeRO without it, and those of `DistributedDataParallel` where something else is used."""
        zero, has_zero, has_pipeline = self.zero.zero, self.zero_stage > 0, self.microbatching is not None
        of_ddp = ("check_reduction", "gradient_as_bucket_view", "static_graph")
        refused = {
            "cpu_offload": (zero.cpu_offload and not has_zero, "zero_stage=1, which partitions optimizer states"),
            "communication_dtype": (zero.communication_dtype is not None and not has_zero, "zero_stage=1"),
            "overlap_allgather": (
                zero.overlap_allgather and (has_pipeline or not has_zero),
                "zero_stage=1 and no pipeline",
            ),
            **{
                name: (getattr(self.ddp, name) and (has_zero or has_pipeline), "zero_stage=0 and no pipeline")
                for name in of_ddp
            },
        }
        for name, (is_refused, instead) in refused.items():
            if is_refused:
                raise UnsupportedError(
                    f"An option must apply to the chosen parallelism. Found {name} with zero_stage={self.zero_stage} "
                    f"and {'a' if has_pipeline else 'no'} pipeline, where it has no effect. Leave it out; it works "
                    f"with {instead}."
                )

    @property
    def placement(self) -> StagePlacement:
        """Which rank of the pp axis has which stage."""
        return StagePlacement(self.pp_size, self.num_chunks if self.pp_size > 1 else 1, is_v=self.style == "zbv")

    @property
    def schedule(self) -> Schedule:
        """What makes the order of passes of a training step."""
        return self.given_schedule or SCHEDULES[self.style]

    @property
    def dtype(self) -> torch.dtype | None:
        """What the model is cast to; None leaves it as it is."""
        return self.zero.dtype

    def find_mesh(self) -> ParallelMesh:
        """Find the mesh in force if it has these axes, or make one."""
        ambient = ambient_mesh()
        sizes: dict[Axis, int] = {"tp": self.tp_size, "pp": self.pp_size, "sp": self.sp_size, "ep": self.ep_size}
        if ambient is not None and all(ambient.size(axis) == size for axis, size in sizes.items()):
            return ambient
        return ParallelMesh(**sizes, dp_outside=self.dp_outside)

    def shard_config(self, mesh: ParallelMesh) -> ShardConfig:
        """Return the configuration of `ShardFormer` on a mesh."""
        return replace(self.sharding, mesh=mesh)


def parse_hybrid_options(given: Mapping[str, Any]) -> tuple[ScalerConfig, HybridOptions]:
    """Fold the keywords of the plugin into one object for each concern."""
    check_policy(given["custom_policy"])
    keywords, stage = Keywords("HybridParallelPlugin", given), given["zero_stage"]
    zero = keywords.read(ZeroConfig, stage=2 if stage == 2 else 1)  # noqa: PLR2004 (the stage of ZeRO)
    batching, layers = (given["num_microbatches"], given["microbatch_size"]), given["num_layers_per_stage"]
    return keywords.read(ScalerConfig), keywords.read(
        HybridOptions,
        sp_size=_size_of_sp(given),
        style=given["pp_style"],
        num_chunks=given["num_model_chunks"],
        given_schedule=_given_schedule(given),
        num_layers_per_stage=None
        if layers is None
        else tuple(len(each) if isinstance(each, range) else each for each in layers),
        microbatching=None if batching == (None, None) else Microbatching(*batching),
        sharding=keywords.read(ShardConfig),
        caches=given["enable_metadata_cache"],
        zero=keywords.read(ZeroOptions, plugin="HybridParallelPlugin", zero=zero, clipping=keywords.read(Clipping)),
        ddp=keywords.read(DDPConfig),
    )


def _size_of_sp(given: Mapping[str, Any]) -> int:
    """Give the sp axis one rank where sequences are sharded over tp, whatever size was passed."""
    size = 1 if given["sp_size"] is None else given["sp_size"]
    mode, tp_size = given["sequence_parallelism_mode"], given["tp_size"]
    if size <= 1 or mode not in MODES_OF_TP or tp_size == 1 or not given["enable_sequence_parallelism"]:
        return size
    if size != tp_size:
        get_dist_logger().warning(
            f"In the mode {mode!r} sequences are sharded over the {tp_size} ranks of tp: sp_size={size} has no effect.",
            ranks=[0],
        )
    return 1


def _given_schedule(given: Mapping[str, Any]) -> GivenSchedule | None:
    """Read the nodes of a schedule that a program passes."""
    nodes, style = given["scheduler_nodes"], given["pp_style"]
    if nodes is None:
        return None
    if style != "zbv" or given["pp_size"] == 1:
        raise ConfigError(
            f"scheduler_nodes is the order of passes in a V. Found it with pp_style={style!r} and "
            f"pp_size={given['pp_size']}. Pass pp_style='zbv', num_model_chunks=2 and pp_size >= 2, or leave it out."
        )
    return GivenSchedule.of_nodes(nodes, StagePlacement(given["pp_size"], _CHUNKS["zbv"] or 1, is_v=True))
