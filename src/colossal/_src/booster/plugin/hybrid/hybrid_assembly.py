"""How `HybridParallelPlugin` builds what a rank trains: one pass of steps, each from an assembly to the next.

`configure` runs the pass on the user's model, and `plan_step` on a model without values.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.amp import (
    DynamicScaler,
    LossScaler,
    MasterWeights,
    NoScaler,
    ScalerConfig,
    cast_inputs_and_outputs,
    cast_model,
    castable_parameters,
)
from colossal._src.booster.plugin.hybrid.batch_executor import BatchExecutor
from colossal._src.booster.plugin.hybrid.full_training_spec import FullTrainingSpec
from colossal._src.booster.plugin.hybrid.hybrid_options import HybridOptions
from colossal._src.booster.plugin.hybrid.pipelined_model import GradientAverager, HybridExecutor, PipelinedModel
from colossal._src.booster.plugin.hybrid.stage_refusal import refused_by_all_stages
from colossal._src.booster.plugin.hybrid.stage_sharding import (
    cast_stage_inputs_and_outputs,
    check_sharded_stages,
    choose_plan,
    extract_stages,
    rebind_to_stages,
    set_placements,
    shard_stages,
)
from colossal._src.booster.plugin.replica_sync import broadcast_buffers_before_forward, broadcast_initial_values
from colossal._src.booster.plugin.wrap_units import find_units
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import RandomStreams
from colossal._src.interface import (
    Capabilities,
    ModelWrapper,
    OptimizerWrapper,
    Peers,
    check_equal_rounding,
    check_optimizer,
    reduce_in_each_pass,
    set_random_streams,
)
from colossal._src.pipeline import PipelineExecutor, Stage, StageModules, broadcast_tied_parameters
from colossal._src.shardformer import PlanMaker
from colossal._src.tensor import ParallelPlan, group_by_replicas, move_module
from colossal._src.zero import ZeroShards, shard_optimizer


@final
@dataclass(frozen=True)
class Assembly:
    """What is built so far of a model that is trained in parts."""

    model: nn.Module  # the full model, the same on all ranks, or this rank's `StageModules`
    optimizer: Optimizer | None  # of the full model; None to run forward passes only
    policy: ParallelPlan | PlanMaker | None  # the plan of the model, or what makes it; None for that of its family
    options: HybridOptions  # of the plugin
    loss_scale: ScalerConfig  # how the loss scale changes
    mesh: ParallelMesh
    # the mesh on whose dp axis are all ranks with the same parameters: those of the sp axis as well
    replicas: ParallelMesh
    device: torch.device  # where the stages go; ``meta`` to plan a step
    full_spec: FullTrainingSpec  # what the model and the optimizer are before they are sharded
    plan: ParallelPlan | None = None  # the plan of the model; None where nothing of it is needed
    chosen: tuple[str, ...] = ()  # the options of the full model that each stage has
    stages: tuple[Stage, ...] = ()  # the stages of this rank
    masters: MasterWeights | None = None  # float32 copies that the optimizer holds; None without any
    wrapper: OptimizerWrapper | None = None  # the optimizer of what this rank has

    @property
    def is_planned(self) -> bool:
        """Whether there are no values."""
        return self.device.type == "meta"

    @property
    def all_stages(self) -> nn.ModuleList:
        """All stages of this rank as one module."""
        return nn.ModuleList(self.stages)

    @property
    def trained(self) -> nn.Module:
        """What the optimizer updates: the model itself where it is not split."""
        return self.stages[0].module if self.options.pp_size == 1 else self.all_stages


def build(begin: Assembly) -> Assembly:
    """Build what a rank trains, but for what connects it with its replicas and other stages.

    Communication: broadcast, tp, sp, dp and pp, the bytes of the stages: all ranks start from the values of the first;
    all_reduce, pp, 16 bytes, by which stages learn what one of them refuses.
    """
    steps: Sequence[Callable[[Assembly], Assembly]] = (
        check,
        partition,
        broadcast_values,
        shard,
        materialize_shards,
        rebind_optimizer,
        cast,
        wrap_optimizer,
    )
    return reduce(lambda assembly, step: step(assembly), steps, begin)


def check(assembly: Assembly) -> Assembly:
    """Reject what cannot be sharded, and find the plan of the model and its options."""
    mesh = assembly.mesh
    if assembly.optimizer is not None:
        check_optimizer(
            assembly.optimizer, shards=max(mesh.size("tp"), mesh.size("ep")) > 1, subsets=mesh.size("pp") > 1
        )
    if isinstance(assembly.model, StageModules):
        assert assembly.full_spec.outline is not None
        check_sharded_stages(assembly.full_spec.outline, mesh)
        return assembly
    plan, chosen = choose_plan(assembly.model, assembly.policy, assembly.options, mesh)
    return replace(assembly, plan=plan, chosen=chosen)


def partition(assembly: Assembly) -> Assembly:
    """Keep the stages of this rank."""
    if isinstance(assembly.model, StageModules):
        assert assembly.full_spec.outline is not None
        stages = assembly.model.to_stages(assembly.full_spec.outline, assembly.mesh.rank("pp"))
    else:
        stages = extract_stages(assembly.model, assembly.plan, assembly.options, assembly.mesh)
    return replace(assembly, stages=tuple(stages))


def broadcast_values(assembly: Assembly) -> Assembly:
    """Start the ranks of a stage from the same values; lazy models only agree on the random generator."""
    if not assembly.is_planned:
        broadcast_initial_values(assembly.all_stages, assembly.mesh)
    return assembly


def shard(assembly: Assembly) -> Assembly:
    """Shard each stage over tp, and set up sequence parallelism.

    Communication: that of `refused_by_all_stages`.
    """
    with nullcontext() if assembly.is_planned else refused_by_all_stages(assembly.mesh):
        shard_stages(assembly.stages, assembly.plan, assembly.chosen, assembly.options, assembly.mesh)
    return assembly


def materialize_shards(assembly: Assembly) -> Assembly:
    """Give values to shards of what was built lazily, and say where the rest of each parameter is."""
    from colossal._src.lazy import materialize

    move_module(materialize(assembly.all_stages), assembly.device)
    set_placements(assembly.stages, assembly.mesh)
    if not assembly.is_planned:
        broadcast_tied_parameters(assembly.stages, assembly.options.placement, assembly.mesh)
    return assembly


def rebind_optimizer(assembly: Assembly) -> Assembly:
    """Replace the parameters of the full model in the optimizer by those of this rank."""
    if assembly.optimizer is not None:
        rebind_to_stages(assembly.optimizer, assembly.full_spec.names, assembly.stages)
    return assembly


def cast(assembly: Assembly) -> Assembly:
    """Cast the stages, whose optimizer keeps float32 master weights."""
    dtype, masters = assembly.options.dtype, None
    if dtype is None:
        return assembly
    # ZeRO keeps float32 copies of its shards by itself
    if assembly.optimizer is not None and assembly.options.zero_stage == 0:
        masters = MasterWeights(assembly.optimizer, castable_parameters(assembly.trained), dtype)
    cast_model(assembly.trained, dtype)
    if assembly.options.pp_size > 1:
        cast_stage_inputs_and_outputs(assembly.stages, dtype)
    return replace(assembly, masters=masters)


def wrap_optimizer(assembly: Assembly) -> Assembly:
    """Wrap the optimizer, so that overflow checks and norms cover all ranks."""
    optimizer, options, mesh, zero = assembly.optimizer, assembly.options, assembly.mesh, assembly.options.zero
    if optimizer is None:
        return assembly
    if options.ddp.fp8_communication:
        tied = any(stage.shared for stage in assembly.stages)
        with nullcontext() if assembly.is_planned else refused_by_all_stages(mesh):
            check_equal_rounding(assembly.trained.parameters(), has_tied_stages=tied)
    scaled = options.dtype == torch.float16
    scaler: LossScaler = DynamicScaler(assembly.loss_scale, assembly.device.type) if scaled else NoScaler()
    names, full_spec = assembly.full_spec.names_of(assembly.stages), assembly.full_spec.optimizer_spec(mesh)
    peers = None
    if mesh.size("pp") > 1:
        peers = Peers((mesh.group("pp"),), mesh.accelerator.get_current_device())
    if options.zero_stage > 0:
        wrapper = shard_optimizer(
            assembly.trained,
            optimizer,
            zero.partitions(assembly.replicas),
            zero.zero,
            scaler=scaler,
            clipping=zero.clipping,
            units=find_units(assembly.trained, None, set()) if zero.zero.overlap_allgather else (),
            peers=peers,
            param_names=names,
            full_spec=full_spec,
        )
    else:
        wrapper = OptimizerWrapper(
            optimizer, scaler, names, assembly.masters, zero.clipping.max_norm, peers=peers, full_spec=full_spec
        )
    return replace(assembly, wrapper=wrapper)


def connect(built: Assembly) -> tuple[ModelWrapper, Capabilities]:
    """Connect what a rank trains with its replicas, and with the other stages."""
    shards = built.wrapper.masters if built.wrapper is not None else None
    zero_shards = shards if isinstance(shards, ZeroShards) else None
    # elsewhere `DistributedDataParallel` broadcasts buffers by itself
    if built.options.ddp.broadcast_buffers and (zero_shards is not None or built.options.pp_size > 1):
        for stage in built.stages:
            broadcast_buffers_before_forward(stage.module, built.replicas)
    return _connect_pipeline(built, zero_shards) if built.options.pp_size > 1 else _connect_model(built, zero_shards)


def _connect_pipeline(built: Assembly, zero_shards: ZeroShards | None) -> tuple[ModelWrapper, Capabilities]:
    options, stages, mesh = built.options, built.stages, built.mesh
    assert options.microbatching is not None
    streams = RandomStreams(mesh)
    spec = built.full_spec.model_spec_of_stages(stages, mesh)
    sharing = options.shard_config(mesh).sequence_parallel_config(mesh)
    run = PipelineExecutor(
        stages,
        options.placement,
        mesh,
        options.style,
        options.microbatching,
        options.caches,
        streams,
        options.given_schedule,
        spec,
        None if sharing is None else sharing.sharding.check_length,
    )
    model = PipelinedModel(stages, run, spec, built.full_spec.adapters)
    wrapper = ModelWrapper(model)
    set_random_streams(wrapper, streams)
    if zero_shards is not None:  # whose gradients are reduced when a step needs them, however many passes were before
        return wrapper, Capabilities(executor=HybridExecutor(run, zero_shards.no_sync, lambda: None))
    replicas = GradientAverager(stages, built.replicas, options.ddp)
    if built.wrapper is not None:
        built.wrapper.limit_parameters(built.trained.parameters())
        replicas.watch(built.wrapper)
    executor = HybridExecutor(run, nullcontext, replicas.average)
    return wrapper, Capabilities(no_sync=replicas.sync.paused, executor=executor)


def _connect_model(built: Assembly, zero_shards: ZeroShards | None) -> tuple[ModelWrapper, Capabilities]:
    options, model = built.options, built.stages[0].module
    wrapper, no_sync = None, nullcontext
    if zero_shards is not None:
        no_sync = zero_shards.no_sync if options.zero.zero.keeps_gradients else reduce_in_each_pass
    elif any(replicas.has_others for replicas in group_by_replicas(model.parameters(), built.replicas)):
        replicated = options.ddp.replicate(model, built.replicas)
        wrapper, no_sync = replicated.wrap(built.wrapper), replicated.no_sync
    wrapper = wrapper or ModelWrapper(model)
    if options.dtype is not None:
        cast_inputs_and_outputs(wrapper, options.dtype)
    executor = None
    if options.microbatching is not None:
        executor = BatchExecutor(wrapper, built.device, options.microbatching, no_sync)
    return wrapper, Capabilities(no_sync=no_sync, executor=executor)
