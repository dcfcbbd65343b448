"""Shard a model as its plan says."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, final

from torch import nn

from colossal._src._closest import closest_name
from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.interface import saved_copies
from colossal._src.lazy import materialize
from colossal._src.nn.moe import ExpertParallel
from colossal._src.shardformer.activation_checkpointing import checkpoint_layers
from colossal._src.shardformer.adapters import is_adapted, layers_inside, shard_adapted_layer, shard_copied_layer
from colossal._src.shardformer.balance_loss import balance_over_ranks
from colossal._src.shardformer.causal_loss import ParallelCausalLoss, has_causal_loss, set_causal_loss
from colossal._src.shardformer.full_model_methods import adapt_full_model_methods
from colossal._src.shardformer.generation import adapt_generate
from colossal._src.shardformer.head_counts import (
    adjust_key_value_groups,
    check_heads,
    divide_attribute,
    skip_uneven_attention,
)
from colossal._src.shardformer.head_layers import HeadInputSplitter
from colossal._src.shardformer.input_gradients import merge_input_gradients
from colossal._src.shardformer.model_options import apply_options, choose_options
from colossal._src.shardformer.own_plan import checks_of_own_plan
from colossal._src.shardformer.plans import PlanMaker, check_policy, is_of_family, plan_of, read_plan
from colossal._src.shardformer.sequence_parallel import shard_sequence
from colossal._src.shardformer.shard_config import SequenceParallelConfig, ShardConfig
from colossal._src.shardformer.sharded_logits import mark_outputs, mark_tokens
from colossal._src.shardformer.styles import EXPERT_STYLES, STYLES, StyleContext
from colossal._src.shardformer.ties import find_tied_parameters, retie_parameters
from colossal._src.tensor import (
    ParallelPlan,
    base_model_of,
    carry_over_attributes,
    carry_over_hooks,
    find_modules,
    refuse_collected_outputs,
    refuse_given_cache,
    refuse_gradient_hooks,
    unwrap_adapters,
)
from colossal.errors import ConfigError, MeshError, PlanError
from colossal.logging import get_dist_logger

_LARGE = 1 << 20
_KEEP_MODULE = ("replicate", "replicated_with_grad_allreduce", "split_input", *EXPERT_STYLES)
_COMPUTE_THE_SAME = ("FalconLinear",)
_OF_EMBEDDINGS = ("vocab", "embedding_colwise")


@final
class ShardFormer:
    """Shards models over tp, experts over ep, and sequences over tp or sp, by plans, and applies the other options.

    Forward methods stay as they are; some modules are replaced, and some get hooks.

    Args:
        shard_config: How.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.shardformer import ShardConfig, ShardFormer
        >>> from colossal.testing import fake_world
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64))
        >>> with fake_world(2):
        ...     sharded, _ = ShardFormer(ShardConfig(ParallelMesh(tp=2))).optimize(model)
        >>> sharded.model.layers[0].mlp.up_proj.weight.shape
        torch.Size([16, 16])
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config

    def optimize(self, model: nn.Module, policy: ParallelPlan | PlanMaker | None = None) -> tuple[nn.Module, list[Any]]:
        """Shard a model in place, apply the options, and materialize what this rank has of a lazy one.

        Args:
            model: The same model on all ranks; of Hugging Face, or with a plan of its own.
            policy: Its plan, or a function that makes it from the model and the mesh; by default that of its family,
                or else that which its configuration has.

        Returns:
            The model, and what stages of a pipeline have in common: nothing, as there is one stage.

        Raises:
            PlanError: The plan does not fit the model, numbers of the model are not divisible by the tp or the ep size,
                or it has no experts to shard over ep.
            MeshError: The tp axis is arranged as a grid.
            ConfigError: `policy` is something else, there is no such mode of sp_config sequences, its axis has one rank
                and the other several, the numbers of layers that are checkpointed do not fit the model, or
                `expert_exchange` is chosen without experts that it is for.
            UnsupportedError: The model does not support an option, or the mode needs another attention implementation.

        Communication: none; its layers communicate when they run.
        """
        self.shard(model, policy)
        return materialize(model), []

    def shard(self, model: nn.Module, policy: ParallelPlan | PlanMaker | None = None) -> None:
        """Shard a model as `optimize` does, and leave what is lazy lazy, for whoever prepares it further.

        Args:
            model: As of `optimize`.
            policy: As of `optimize`.

        Raises:
            PlanError: As of `optimize`, as are the others.
            MeshError: The plan shards over one axis, and the tp axis of the mesh is arranged otherwise.

        Communication: none; its layers communicate when they run.
        """
        check_policy(policy, "policy")
        config, mesh = self.shard_config, self.shard_config.mesh or current_mesh()
        sp_config = config.sequence_parallel_config(mesh)
        needs_plan = config.shards_tensors(mesh) or mesh.size("ep") > 1 or sp_config is not None
        if needs_plan and mesh.tp_mode != "1d":
            raise MeshError(
                f"Plans shard models over one axis. Found a mesh whose tp axis is arranged as {mesh.tp_mode}. Build "
                "it with tp_mode='1d'."
            )
        check_expert_exchange(model, config, mesh)
        chosen = choose_options(model, config)
        plan: ParallelPlan | None = None
        if needs_plan or config.gradient_checkpoint_config is not None:
            plan = plan_of(model) if policy is None else read_plan(policy, model, mesh)
        set_up_checks = None
        if plan is not None and policy is not None and config.shards_tensors(mesh) and not is_of_family(plan, model):
            set_up_checks = checks_of_own_plan(model, plan, mesh, shards_tokens=sp_config is not None)
        if config.gradient_checkpoint_config is not None:
            checkpoint_layers(model, plan, config.gradient_checkpoint_config)
        apply_options(model, chosen)
        if needs_plan and plan is not None:
            if plan != plan.for_stage():
                check_experts(model, plan, mesh)
            _parallelize(unwrap_adapters(model), plan, mesh, config, sp_config)
            if set_up_checks is not None:
                set_up_checks()
        balance_over_ranks(unwrap_adapters(model), mesh, None if sp_config is None else sp_config.sharding)


def _parallelize(
    model: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh,
    config: ShardConfig,
    sp_config: SequenceParallelConfig | None,
) -> None:
    """Shard a model and its sequences, and replace its loss accordingly."""
    keep_sharded, is_vocab_parallel = config.parallel_output and has_causal_loss(model), False
    if config.shards_tensors(mesh):
        _check_uneven(model, plan, mesh, sp_config)
        is_vocab_parallel = _apply_plan(model, plan, mesh, config, keep_sharded)
        adapt_full_model_methods(model)
        is_attention_sharded = skip_uneven_attention(plan, getattr(model, "config", None), mesh.size("tp")) is plan
        is_attention_sharded = is_attention_sharded and all(counts.is_sharded for counts in plan.counts)
        if sp_config is None and is_attention_sharded:  # sequence parallelism refuses more
            model.register_forward_pre_hook(_refuse_attentions, with_kwargs=True)
        if is_attention_sharded:
            model.register_forward_pre_hook(_refuse_full_cache, with_kwargs=True)
    elif mesh.size("ep") > 1:
        _apply_plan(model, experts_only(plan), mesh, config, False)
    if sp_config is not None:
        _refuse_adapters(model, sp_config)
        shard_sequence(model, plan, sp_config, keep_sharded)
    sharding = None if sp_config is None or sp_config.is_over_tp else sp_config.sharding
    if keep_sharded and (is_vocab_parallel or sharding is not None):
        set_causal_loss(model, ParallelCausalLoss(mesh, sharding, is_vocab_parallel))
    if is_vocab_parallel:
        mark_outputs(model)
    elif keep_sharded and sharding is not None:  # what needs all tokens needs all vocabulary entries too, see above
        mark_tokens(model, sharding.size)
    adapt_generate(model, mesh, shards_vocabulary=is_vocab_parallel, shards_tokens=sp_config is not None)


def experts_only(plan: ParallelPlan) -> ParallelPlan:
    """Keep the rows of experts, which are sharded over ep whether or not the rest is sharded over tp."""
    return ParallelPlan({row: style for row, style in plan.styles.items() if style in EXPERT_STYLES})


def has_sharded_experts(model: nn.Module) -> bool:
    """Whether ranks have different experts of a model already, as of one that was built on a mesh with an ep axis."""
    return any(isinstance(each, ExpertParallel) for each in model.modules())


def check_experts(model: nn.Module, plan: ParallelPlan, mesh: ParallelMesh) -> None:
    """Reject a full model without experts on ranks that are to share them."""
    if mesh.size("ep") == 1 or has_sharded_experts(model):
        return
    if not list(experts_only(plan).rows(base_model_of(model))):
        raise PlanError(
            f"Experts are sharded over the ep axis. Found {mesh}, and {type(model).__name__}, which has none, or whose "
            "plan does not name them. Leave ep out, or pass a ParallelPlan with a row for them, of the style "
            "'ep_experts'."
        )


def check_expert_exchange(model: nn.Module, config: ShardConfig, mesh: ParallelMesh) -> None:
    """Reject the choice of a way for tokens to come to experts where they do not travel, or one is chosen already."""
    if config.expert_exchange is None:
        return
    if mesh.size("ep") == 1:
        raise ConfigError(
            f"expert_exchange says how tokens come to experts that are sharded over ep. Found "
            f"{config.expert_exchange!r} on {mesh}. Leave it out, or pass an ep size of 2 or more."
        )
    if has_sharded_experts(model):
        raise ConfigError(
            "expert_exchange is for experts that are sharded here. Found some that are sharded already, in "
            f"{type(model).__name__}. Leave it out, and pass exchange={config.expert_exchange!r} to the layers that "
            "shard them."
        )


def _refuse_attentions(model: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
    found = "Found a model whose attention has some of the heads on each rank."
    refuse_collected_outputs([model], kwargs, found, "Use a plugin without tensor parallelism.", ["output_attentions"])


def _refuse_full_cache(model: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("past_key_values") is None:
        return
    config: Any = getattr(model, "config", None)
    full = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if full and full > 1:  # a single one is on all ranks
        found = "Found a model whose attention has some of the heads on each rank."
        advice = (
            "Pass what the model itself returned, train LoRA rather than prefixes, or use a plugin without tensor "
            "parallelism."
        )
        refuse_given_cache(kwargs, found, advice, full)


def _refuse_adapters(model: nn.Module, sp_config: SequenceParallelConfig) -> None:
    found = next((name for name, module in model.named_modules() if is_adapted(module)), None)
    if sp_config.is_over_tp and found is not None:
        raise PlanError(
            f"In the mode {sp_config.mode!r} layers gather the tokens of other ranks, which low-rank adapters do not "
            f"support yet. Found adapters of {found}. Use the mode 'all_to_all' with sp_size instead."
        )


def _check_uneven(
    model: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, sp_config: SequenceParallelConfig | None
) -> None:
    config = getattr(model, "config", None)
    if (
        sp_config is not None
        and sp_config.is_over_tp
        and skip_uneven_attention(plan, config, mesh.size("tp")) is not plan
    ):
        raise PlanError(
            f"The mode {sp_config.mode!r} needs sharded attention. Found {type(model).__name__}, whose heads do not "
            f"divide by tp={mesh.size('tp')}, so that its attention stays replicated. Disable sequence parallelism."
        )


def _apply_plan(
    model: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, config: ShardConfig, keep_sharded: bool
) -> bool:
    """Shard a model over tp; return whether its logits stay sharded over the vocabulary."""
    base, size = base_model_of(model), mesh.size("tp")
    for pattern in plan.nested:
        for _, module in find_modules(base, pattern):
            if next(module.parameters(), None) is not None:  # else another stage of a pipeline has it
                inner = plan_of(module)
                _apply_plan(module, inner.for_stage() if plan == plan.for_stage() else inner, mesh, config, False)
    of_model = getattr(model, "config", None)
    plan = skip_uneven_attention(plan, of_model, size)
    num_key_value_heads = check_heads(plan, of_model, size)
    context = StyleContext(mesh, num_key_value_heads, not keep_sharded, config.expert_exchange)
    # Both before anything is replaced: rows of a plan and tied parameters are those of the full model.
    chosen, ties = list(_styled_modules(model, base, plan)), find_tied_parameters(model)
    _refuse_gradient_hooks(chosen)
    made: dict[nn.Module, nn.Module] = {}
    for root, name, module, style in chosen:
        # A module with several names must stay one module.
        if module not in made:
            for layer in layers_inside(module):
                _check_kind(name, layer, style)
            params = dict(module.named_parameters())
            shard = shard_adapted_layer if is_adapted(module) else shard_copied_layer if saved_copies(module) else None
            made[module] = (shard or _apply_style)(name, module, style, context)
            _carry_over(module, params, made[module])
        path, _, last = name.rpartition(".")
        setattr(root.get_submodule(path), last, made[module])
    retie_parameters(model, ties, {layer for each in made.values() for layer in layers_inside(each)})
    merge_input_gradients(model, mesh)
    for pattern in plan.divide_by_tp:
        divide_attribute(base, pattern, size)
    adjust_key_value_groups(base, num_key_value_heads, size)
    for pattern, arguments in plan.split_inputs.items():
        for _, module in find_modules(base, pattern):
            module.register_forward_pre_hook(HeadInputSplitter(arguments, mesh), with_kwargs=True)
    _log_summary(model, len(made), mesh)
    return keep_sharded and any(style == "lm_head" for *_, style in chosen)


def _refuse_gradient_hooks(chosen: Sequence[tuple[nn.Module, str, nn.Module, str]]) -> None:
    for _, name, module, style in chosen:
        if style not in _KEEP_MODULE or style in EXPERT_STYLES:
            refuse_gradient_hooks(module.named_parameters(name), "Tensor parallelism")


def _carry_over(module: nn.Module, params: Mapping[str, nn.Parameter], new: nn.Module) -> None:
    """Keep what the program has put on a module and its parameters, where others take their place."""
    for name, parameter in new.named_parameters():
        if name in params and params[name] is not parameter:
            carry_over_attributes(params[name], parameter)
    if new is not module:
        carry_over_attributes(module, new)
        carry_over_hooks(module, new)


def _apply_style(_name: str, module: nn.Module, style: str, context: StyleContext) -> nn.Module:
    return STYLES[style](module, context)


def _styled_modules(
    model: nn.Module, base: nn.Module, plan: ParallelPlan
) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    of_heads = (
        (model, name, module, style)
        for pattern, style in plan.head_styles.items()
        for name, module in find_modules(model, f"?{pattern}")
    )
    for found in chain(((base, *row) for row in plan.rows(base)), of_heads):
        if next(found[2].parameters(), None) is not None:  # of other stages of a pipeline only placeholders are here
            yield found


def _check_kind(name: str, module: nn.Module, style: str) -> None:
    """Reject a style that there is not, and a layer whose forward method is not that of what would replace it."""
    if style not in STYLES:
        close = closest_name(style, STYLES)
        raise PlanError(
            f"The style of a row is one of {', '.join(STYLES)}. Found {style!r} for {name}. "
            f"{f'Did you mean {close!r}?' if close else 'Use one of these.'}"
        )
    if style in _KEEP_MODULE or type(module).__name__ in _COMPUTE_THE_SAME:
        return
    if "forward" in vars(module):
        raise PlanError(
            "Tensor parallelism replaces layers that compute what their class does. Found that the forward method of "
            f"{name} was replaced. Use a hook, register_forward_hook, or remove the layer from the plan."
        )
    if (user := _weight_user(module)) is not None:
        raise PlanError(
            "Tensor parallelism replaces layers by others that have shards of their weights. Found that the weight of "
            f"{name} {user}. Remove the layer from the plan, so that it stays replicated."
        )
    kinds = [kind for kind in type(module).__mro__ if kind in (nn.Linear, nn.Embedding) or kind.__name__ == "Conv1D"]
    if kinds and (kinds[0] is nn.Embedding) != (style in _OF_EMBEDDINGS):
        raise PlanError(
            f"Embeddings are sharded by {' or '.join(_OF_EMBEDDINGS)}, other layers by another style. Found {style!r} "
            f"for {name}, a {type(module).__name__}. Change the row of the plan."
        )
    if not kinds or type(module).forward is not kinds[0].forward:
        advice = "Remove it from the plan, so that it stays replicated."
        if type(module).__module__.startswith("peft."):  # as one that trains some rows of an embedding
            advice = "Name the module in modules_to_save instead, leave it to the frozen model, or use tp_size=1."
        raise PlanError(
            f"The style {style!r} is for modules that compute what Linear, Embedding or Conv1D do. Found {name}, a "
            f"{type(module).__name__}. {advice}"
        )


def _weight_user(module: nn.Module) -> str | None:
    """Return what else uses or makes the weight of a layer."""
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "is used by torch.nn.MultiheadAttention, which does not call the layer"
    own = module._parameters  # noqa: SLF001 (has no public name)
    is_computed = hasattr(module, "parametrizations") or any(name.startswith("weight_") for name in own)
    if "weight" in own or not is_computed:
        return None
    return "is computed, as by weight_norm or another parametrization, and is no parameter"


def _log_summary(model: nn.Module, num_sharded: int, mesh: ParallelMesh) -> None:
    """Log which large layers stay replicated."""
    sizes = " with ".join(f"{axis}={mesh.size(axis)}" for axis in ("tp", "ep") if mesh.size(axis) > 1)
    replicated = [
        f"{name} ({' x '.join(map(str, module.weight.shape))})"
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.numel() >= _LARGE
    ]
    left = f"; large layers that stay replicated: {', '.join(replicated)}" if replicated else ""
    get_dist_logger().info(f"{type(model).__name__}: {sizes} shards {num_sharded} layers{left}", ranks=[0])
