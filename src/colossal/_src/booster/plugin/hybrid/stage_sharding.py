"""From a full model to the stages of a rank, sharded over tp."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.amp import cast_floats
from colossal._src.booster.plugin.hybrid.hybrid_options import HybridOptions
from colossal._src.cluster import ParallelMesh
from colossal._src.interface import has_uniform_state, is_peft_model, rebind_param_groups, uniform_state_like
from colossal._src.pipeline import (
    FullOutline,
    Stage,
    StageOutput,
    copy_structure,
    count_layers,
    is_layer_sequence,
    partition_by_counts,
    partition_uniform,
)
from colossal._src.shardformer import (
    MODEL_OPTIONS,
    PlanMaker,
    ShardConfig,
    ShardFormer,
    apply_options,
    balance_over_ranks,
    check_checkpointing,
    check_expert_exchange,
    check_experts,
    check_tied_styles,
    checkpoint_layers,
    choose_options,
    has_sharded_experts,
    plan_of,
    read_plan,
)
from colossal._src.tensor import (
    Layout,
    ParallelPlan,
    Placement,
    base_model_of,
    parameter_names,
    placement_of,
    set_placement,
    unwrap_adapters,
)
from colossal.errors import ConfigError, UnsupportedError


def choose_plan(
    model: nn.Module, policy: ParallelPlan | PlanMaker | None, options: HybridOptions, mesh: ParallelMesh
) -> tuple[ParallelPlan | None, tuple[str, ...]]:
    """Find the plan and options of a model, and reject what does not fit it, before anything is changed."""
    config = options.shard_config(mesh)
    check_expert_exchange(model, config, mesh)
    checkpoints = config.gradient_checkpoint_config is not None
    chosen = tuple(choose_options(model, config))
    if not _needs_plan(model, options, mesh):
        return policy if isinstance(policy, ParallelPlan) else None, chosen
    plan = plan_of(model) if policy is None else read_plan(policy, model, mesh)
    check_experts(model, plan, mesh)
    if mesh.size("tp") > 1:
        list(plan.rows(base_model_of(model)))  # a row that matches nothing is an error of the full model
        if policy is not None:
            check_tied_styles(model, plan)
    if checkpoints:
        _check_checkpointing(model, plan, options)
    return plan, chosen


def check_stage_modules(policy: ParallelPlan | PlanMaker | None, options: HybridOptions, device: torch.device) -> None:
    """Reject options that change a full model, where the user built each stage."""
    if device.type == "meta":
        raise UnsupportedError(
            "A step is planned of a full model, whose stages before this rank's are run for their shapes. Found "
            "StageModules. Plan a model that the plugin partitions, such as a torch.nn.Sequential of the layers."
        )
    config = options.sharding
    refused = {
        "pp_size": options.pp_size == 1,
        "custom_policy": policy is not None,
        "num_layers_per_stage": options.num_layers_per_stage is not None,
        "gradient_checkpoint_config": config.gradient_checkpoint_config is not None,
        "enable_sequence_parallelism": config.enable_sequence_parallelism,
        "enable_all_optimization": config.enable_all_optimization,
        "expert_exchange": config.expert_exchange is not None,
        **{name: getattr(config, name) for name in MODEL_OPTIONS},
    }
    if found := [name for name, is_refused in refused.items() if is_refused]:
        raise UnsupportedError(
            "StageModules are stages of a pipeline that the user has built as they train: the plugin does not change "
            f"their layers. Found {', '.join(found)}. Use pp_size=2 or more and leave the others out: build stages of "
            "as many layers as you like, of modules that checkpoint their activations, or of layers of colossal.nn."
        )


def check_sharded_stages(outline: FullOutline, mesh: ParallelMesh) -> None:
    """Reject stages that all tensor-parallel ranks would compute in full."""
    if mesh.size("tp") > 1 and not outline.is_compute_sharded:
        raise ConfigError(
            f"Stages on {mesh.size('tp')} tensor-parallel ranks are built of layers that are sharded over them. Found "
            "no such parameter on any stage. Build them of the layers of colossal.nn inside of `with plugin.mesh:`, or "
            "pass tp_size=1."
        )


def _needs_plan(model: nn.Module, options: HybridOptions, mesh: ParallelMesh) -> bool:
    is_split = mesh.size("pp") > 1 and not is_layer_sequence(model)
    is_sharded = any(
        placement_of(parameter).is_compute_sharded for parameter in model.parameters()
    )  # as layers of colossal.nn
    checkpoints = options.sharding.gradient_checkpoint_config is not None
    by_mesh = (mesh.size("tp") > 1 and not is_sharded) or mesh.size("sp") > 1
    by_mesh = by_mesh or (mesh.size("ep") > 1 and not has_sharded_experts(model))
    return by_mesh or is_split or checkpoints


def extract_stages(
    model: nn.Module, plan: ParallelPlan | None, options: HybridOptions, mesh: ParallelMesh
) -> list[Stage]:
    """Keep the stages of this rank."""
    stage_indices = options.placement.stages_of(mesh.rank("pp"))
    # a stage takes its modules out of the model, so that each one needs a model of its own
    models = [model] if len(stage_indices) == 1 else [copy_structure(model) for _ in stage_indices]
    return [_extract_stage(each, index, plan, options) for each, index in zip(models, stage_indices, strict=True)]


def shard_stages(
    stages: Sequence[Stage],
    plan: ParallelPlan | None,
    chosen: Collection[str],
    options: HybridOptions,
    mesh: ParallelMesh,
) -> None:
    """Shard each stage over tp, in place, and set up sequence parallelism."""
    config = options.shard_config(mesh)
    sharing = config.sequence_parallel_config(mesh)
    for stage in stages:
        _optimize(stage, plan, chosen, config, mesh)
        if plan is not None:
            stage.set_sequence_parallel_size(1 if sharing is None else sharing.sharding.size)
    _retie_shared_params(stages)


def _optimize(
    stage: Stage, plan: ParallelPlan | None, chosen: Collection[str], config: ShardConfig, mesh: ParallelMesh
) -> None:
    """Apply the options of the full model to a stage, and shard it."""
    if config.gradient_checkpoint_config is not None:
        checkpoint_layers(stage.module, plan, config.gradient_checkpoint_config, stage.index, stage.num_stages)
    apply_options(stage.module, chosen)
    if plan is not None:
        # `apply_options` has applied what the full model chose; a stage alone might choose otherwise
        done = dict.fromkeys((*MODEL_OPTIONS, "enable_all_optimization"), False)
        shard_former = ShardFormer(replace(config, **done, gradient_checkpoint_config=None))
        shard_former.shard(stage.module, plan.for_stage() if stage.num_stages > 1 else plan)
    elif stage.num_stages == 1:
        balance_over_ranks(unwrap_adapters(stage.module), mesh)


def _check_checkpointing(model: nn.Module, plan: ParallelPlan | None, options: HybridOptions) -> None:
    """Reject on all ranks a checkpointing configuration that does not fit one of the stages."""
    assert options.sharding.gradient_checkpoint_config is not None
    parts = _partition(len(check_checkpointing(model, plan)), options)
    for index, part in enumerate(parts):
        options.sharding.gradient_checkpoint_config.num_layers(len(part), index, len(parts))


def stage_inputs(
    model: nn.Module, policy: ParallelPlan | PlanMaker | None, options: HybridOptions, mesh: ParallelMesh, batch: Any
) -> list[StageOutput | None]:
    """Compute the inputs of this rank's stages, by running the previous stages."""
    stage_indices = options.placement.stages_of(mesh.rank("pp"))
    plan = None if policy is None else read_plan(policy, model, mesh)
    if plan is None and mesh.size("pp") > 1 and not is_layer_sequence(model):
        plan = plan_of(model)
    carries: list[StageOutput | None] = [None]
    with torch.no_grad():
        for index in range(max(stage_indices)):
            carry = _extract_stage(copy_structure(model), index, plan, options)(carries[-1], batch)
            carries.append(carry if options.dtype is None else cast_floats(carry, options.dtype))
    return [carries[index] for index in stage_indices]


def _retie_shared_params(stages: Sequence[Stage]) -> None:
    """Tie parameters between the stages of this rank again, after each stage has been sharded."""
    here = {stage.index: stage.module for stage in stages}
    for shared in stages[0].shared:
        places = zip(shared.names, shared.stages, strict=True)
        held = [(here[index], name) for name, index in places if index in here]
        for module, name in held[1:]:
            first, first_name = held[0]
            for alias in parameter_names(module)[module.get_parameter(name)]:
                path, _, leaf = alias.rpartition(".")
                setattr(module.get_submodule(path), leaf, first.get_parameter(first_name))


def set_placements(stages: Sequence[Stage], mesh: ParallelMesh) -> None:
    """Say of each parameter that tp does not shard that its ranks have replicas; and which stage counts a tied one."""
    here = {stage.index: stage.module for stage in stages}
    mark_replicas((each for stage in stages for each in stage.parameters()), mesh)
    for shared in stages[0].shared:
        if shared.stages[0] in here:
            continue
        for name, index in zip(shared.names, shared.stages, strict=True):
            if index in here:
                parameter = here[index].get_parameter(name)
                set_placement(parameter, replace(placement_of(parameter), is_counted=False))


def mark_replicas(parameters: Iterable[nn.Parameter], mesh: ParallelMesh) -> None:
    """Say of each parameter that tp does not shard that its ranks have replicas."""
    if mesh.size("tp") == 1:
        return
    for parameter in parameters:
        if not placement_of(parameter).groups:
            layout = Layout(tuple(parameter.shape), mesh.ranks("tp"))
            set_placement(parameter, Placement(layout, mesh.global_rank, replica_groups=(mesh.group("tp"),)))


def _extract_stage(model: nn.Module, index: int, plan: ParallelPlan | None, options: HybridOptions) -> Stage:
    number = options.placement.num_stages
    if number == 1:
        return Stage(model, 0, 1)
    if is_peft_model(model):
        _refuse_outer_passes(model)
    if is_layer_sequence(model):
        return Stage.of_sequential(model, _partition(len(model), options), index)
    if plan is None or plan.stages is None:
        raise UnsupportedError(
            "A pipeline needs a plan that says how the model is split into stages. Found "
            f"{type(model).__name__}, whose plan has no stages. Use tp_size instead of pp_size, or pass a "
            "ParallelPlan with stages as the custom_policy."
        )
    layers = _partition(count_layers(model, plan.stages), options)
    return Stage.of_model(model, plan.stages, layers, index)


def _refuse_outer_passes(adapted: Any) -> None:
    """Refuse what peft computes around a model: stages run the layers inside of it, with their adapters."""
    from peft.tuners.tuners_utils import BaseTuner

    config, tuner = adapted.active_peft_config, type(adapted.base_model)
    if config.is_prompt_learning:
        added = "prompts"
    elif tuner.forward is not BaseTuner.forward:
        added = f"the forward pass of {tuner.__name__}"
    else:
        return
    raise UnsupportedError(
        "Stages of a pipeline run the layers of a model, with their adapters. Found a model of peft with "
        f"{type(config).__name__}, which adds {added}. Use LoraConfig, or a plugin without pp_size."
    )


def _partition(num_layers: int, options: HybridOptions) -> list[range]:
    if options.num_layers_per_stage is None:
        return partition_uniform(num_layers, options.placement.num_stages)
    parts = partition_by_counts(options.num_layers_per_stage, num_layers)
    if len(parts) != options.placement.num_stages:
        raise ConfigError(
            f"num_layers_per_stage has a number for each of {options.placement.num_stages} stages. Found "
            f"{list(options.num_layers_per_stage)}. With several chunks on each rank, stages are counted over all."
        )
    return parts


def parameters_of(stages: Sequence[Stage]) -> dict[str, nn.Parameter]:
    """Find the parameters of this rank by the names that they have in the full model."""
    return {name: each for stage in stages for name, each in stage.module.named_parameters(remove_duplicate=False)}


def rebind_to_stages(optimizer: Optimizer, names: dict[nn.Parameter, list[str]], stages: Sequence[Stage]) -> None:
    """Replace the parameters of a full model in its optimizer by those of this rank."""
    here = parameters_of(stages)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_unsharded = all(here.get(names[each][0]) is each and not placement_of(each).is_sharded for each in held)
    if not is_unsharded and not has_uniform_state(optimizer):
        raise ConfigError(
            "An optimizer of a model that is sharded is boosted before its first step. Found "
            f"{type(optimizer).__name__} with state of {len(optimizer.state)} parameters, of which this rank is going "
            "to have parts. Build a new one, and load its state by booster.load_optimizer."
        )
    shards = {each: next((here[name] for name in names[each] if name in here), None) for each in held}
    rebind_param_groups(optimizer, shards, shard_like=_same_state if is_unsharded else uniform_state_like)


def _same_state(value: torch.Tensor, _shard: nn.Parameter) -> torch.Tensor:
    return value


def cast_stage_inputs_and_outputs(stages: Sequence[Stage], dtype: torch.dtype) -> None:
    """Cast floating-point inputs of stages on the way in, and outputs of the last to float32 on the way out."""
    for stage in stages:
        stage.register_forward_pre_hook(
            lambda _stage, args, kwargs: cast_floats((args, kwargs), dtype), with_kwargs=True
        )
        if stage.is_last:
            stage.register_forward_hook(lambda _stage, _args, outputs: cast_floats(outputs, torch.float32))
