"""Shards the sequences of a model over ranks before its layers, and gathers them after the layers."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import Axis
from colossal._src.comm import TokenStream
from colossal._src.shardformer.balance_loss import balances_experts
from colossal._src.shardformer.sequence_attention import parallelize_attention
from colossal._src.shardformer.sequence_tensor_parallel import shard_activations
from colossal._src.shardformer.shard_config import SequenceParallelConfig
from colossal._src.tensor import (
    COLLECTED,
    ParallelPlan,
    base_model_of,
    find_modules,
    refuse_collected_outputs,
    refuse_given_cache,
    stop_caching,
)
from colossal.errors import PlanError, ShapeError, UnsupportedError

_STATES = "hidden_states"
_POSITIONS = "position_embeddings"
_NUM_DIMS = 3
_SCALE_BY_POSITION = "llama_4_scaling_beta"  # of rope_parameters
_ONLY_ATTENTION_MIXES = ("full_attention", "sliding_attention", "chunked_attention", "moe", "sparse", "dense")
"""Of the names that transformers has for kinds of layers."""
_CHOOSE_KEYS = ("indexer", "dt_proj")
"""Parts of attention layers, by whose scores for tokens a layer masks keys before it calls its attention function."""


def shard_sequence(model: nn.Module, plan: ParallelPlan, sp_config: SequenceParallelConfig, keep_sharded: bool) -> None:
    """Shard the sequences on which the layers of a model work.

    What comes before the layers, such as embeddings, masks and positions, is computed for all tokens on all ranks, as
    the model's forward method does it. The first layer keeps the local shard of the hidden states.
    """
    if plan.stages is None:
        raise PlanError(
            f"Sequences are sharded before a model's layers. Found {type(model).__name__}, whose plan has no "
            "stages that name them. Use tp_size without sequence parallelism, or pass a ParallelPlan with stages."
        )
    if plan.stages.previous is not None:
        raise PlanError(
            "Sequences are sharded in one list of layers, whose tokens attend only to each other. Found "
            f"{type(model).__name__}, which has {len(plan.stages.lists)}, such as those of an encoder and a decoder. "
            "Use tp_size or pp_size without sequence parallelism."
        )
    base = base_model_of(model)
    layers: Any = base.get_submodule(plan.stages.layers)
    here = [layer for layer in layers if next(layer.parameters(), None) is not None]
    _check_layers(model, here, sp_config)
    if sp_config.is_over_tp:
        shard_activations(base, here, plan, sp_config)
    else:
        _check_heads(model, plan, sp_config)
        parallelize_attention(model, sp_config)
    joins = sp_config.is_over_tp or not keep_sharded or plan.stages.reshapes
    stop_caching(model)
    model.register_forward_pre_hook(partial(_refuse_inputs, sp_config.is_over_tp), with_kwargs=True)
    joins_here = joins and bool(here) and here[-1] is layers[-1]
    if here:
        axis: Axis = "tp" if sp_config.is_over_tp else "sp"
        _draw_by_tokens(model, here[0], here[-1] if joins_here else None, TokenStream(sp_config.sharding.mesh, axis))
    has_images = getattr(model, "main_input_name", "") == "pixel_values"
    for layer in here:
        # Only the first layer of the model shards: to later stages of a pipeline hidden states come sharded.
        layer.register_forward_pre_hook(_ShardHiddenStates(sp_config, layer is layers[0], has_images), with_kwargs=True)
    if joins_here:
        here[-1].register_forward_hook(_GatherHiddenStates(sp_config))
    if joins and keep_sharded and not sp_config.is_over_tp:
        for pattern, style in plan.head_styles.items():
            for _, head in find_modules(model, f"?{pattern}") if style == "lm_head" else ():
                head.register_forward_pre_hook(lambda _head, args: (sp_config.sharding.split(args[0]), *args[1:]))


def _check_layers(model: nn.Module, layers: Sequence[nn.Module], sp_config: SequenceParallelConfig) -> None:
    """Reject layers in which tokens meet otherwise than by attention, which is what gets those of all ranks."""
    if len(set(layers)) < len(layers):
        raise PlanError(
            "Sequences are sharded before the first of a model's layers, and gathered after the last. Found "
            f"{len(layers)} layers of {type(model).__name__}, of which some are one and the same module. Build a "
            "module for each, which may share parameters: layer.weight = other.weight."
        )
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = [kind for kind in getattr(text, "layer_types", None) or () if kind not in _ONLY_ATTENTION_MIXES]
    kinds += [type(each).__name__ for layer in layers for each in layer.modules() if isinstance(each, nn.Conv1d)]
    if kinds:
        raise PlanError(
            "Sequences are sharded where only attention combines tokens, as it gets those of all ranks. Found "
            f"{type(model).__name__} with {', '.join(dict.fromkeys(kinds))}, which would combine those of one rank. "
            "Use tp_size or pp_size without sequence parallelism."
        )
    modules = [] if sp_config.is_over_tp else [each for layer in layers for each in layer.modules()]
    for module, part in itertools.product(modules, _CHOOSE_KEYS):
        if hasattr(module, part):
            raise PlanError(
                f"In the mode {sp_config.mode!r} the attention function gets the tokens of all ranks. Found "
                f"{type(model).__name__}, whose {type(module).__name__} chooses keys before it, by its {part}, of the "
                "tokens of one rank. Use tp_size or pp_size without sequence parallelism."
            )
    if not sp_config.is_over_tp and (getattr(text, "rope_parameters", None) or {}).get(_SCALE_BY_POSITION) is not None:
        raise PlanError(
            f"In the mode {sp_config.mode!r} layers get rotary embeddings for their rank's tokens. Found "
            f"{type(model).__name__}, which scales queries by positions too, as {_SCALE_BY_POSITION} says. Use the "
            "mode 'split_gather' with tp_size."
        )


def _refuse_inputs(is_over_tp: bool, model: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
    found = "Found a model whose layers have some of the tokens on each rank."
    # the loss that is made of routers' logits, which are those of a rank's tokens, is computed over ranks
    refused = [name for name in COLLECTED if name != "output_router_logits" or not balances_experts(model)]
    refuse_collected_outputs([model], kwargs, found, "Use a plugin without sequence parallelism.", refused)
    if not is_over_tp:  # else attention gets all tokens
        advice = "Pass all tokens in one call, or use the mode 'split_gather' with tp_size, or no sequence parallelism."
        refuse_given_cache(kwargs, found, advice)


def _draw_by_tokens(model: nn.Module, first: nn.Module, last: nn.Module | None, stream: TokenStream) -> None:
    """Let ranks draw dropout of their own between the layers that shard and gather tokens."""
    first.register_forward_pre_hook(lambda layer, _: stream.enter() if layer.training else None)
    for module in (model,) if last is None else (last, model):
        module.register_forward_hook(lambda own, *_: stream.leave() if own.training else None, always_call=True)


def _check_heads(model: nn.Module, plan: ParallelPlan, sp_config: SequenceParallelConfig) -> None:
    """In the mode all_to_all, check that the heads of a tp rank divide by sp."""
    if sp_config.mode != "all_to_all":
        return
    config: Any = getattr(model, "config", None)
    mesh = sp_config.sharding.mesh
    for counts in plan.counts:
        heads = getattr(config, counts.heads, 0)
        own = heads // mesh.size("tp") if counts.is_sharded else heads
        if own % mesh.size("sp"):
            fitting = [str(number) for number in range(1, own + 1) if own % number == 0]
            raise PlanError(
                f"In the mode 'all_to_all' sp shards the heads of each tp rank. Found {counts.heads}={heads}, of "
                f"which tp={mesh.size('tp')} leaves each rank {own}, for sp_size={mesh.size('sp')}. Choose one of "
                f"{', '.join(fitting)}, or the mode 'ring_attn'."
            )


@final
class _ShardHiddenStates:
    """Forward pre-hook of a layer: keeps this rank's tokens of inputs that have all tokens."""

    def __init__(self, sp_config: SequenceParallelConfig, is_first: bool, has_images: bool) -> None:
        self._sp_config, self._is_first, self._has_images = sp_config, is_first, has_images

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(kwargs)
        if self._is_first:
            states = args[0] if args else given[_STATES]
            own = self._local_tokens(states)
            _refuse_other_states(layer, states, [*args, *given.values()])
            args, given = ((own, *args[1:]), given) if args else (args, given | {_STATES: own})
        # Over tp, attention gets all tokens again, and needs all positions with them.
        if not self._sp_config.is_over_tp and given.get(_POSITIONS) is not None:
            given[_POSITIONS] = tuple(self._sp_config.sharding.split(each) for each in given[_POSITIONS])
        return args, given

    def _local_tokens(self, states: torch.Tensor) -> torch.Tensor:
        sharding = self._sp_config.sharding
        if states.dim() != _NUM_DIMS:
            raise UnsupportedError(
                "Hidden states of a sequence have the shape (batch, tokens, width). Found "
                f"{tuple(states.shape)}, such as that of an image. Use tp_size or pp_size without sequence parallelism."
            )
        try:
            own = sharding.split(states.detach()[..., :0] if self._sp_config.is_over_tp else states)
        except ShapeError as error:
            if not self._has_images:
                raise
            raise UnsupportedError(
                f"Ranks of a sequence have equally many tokens. Found images of {states.shape[1]} tokens, which are "
                f"patches and what the model adds to them, such as a class token, over {sharding.size} ranks. Use "
                "tp_size or pp_size without sequence parallelism, or images of a size whose tokens divide."
            ) from error
        if not self._sp_config.is_over_tp:
            return own
        return comm.scatter(states, "tp", 1, sharding.mesh)


def _refuse_other_states(layer: nn.Module, states: torch.Tensor, given: Sequence[Any]) -> None:
    """Refuse what a layer combines with hidden states, token by token, as it has those of all ranks."""
    others = [each for each in given if isinstance(each, torch.Tensor) and each is not states]
    found = [each for each in others if each.is_floating_point() and each.dim() == _NUM_DIMS]
    if shape := next((tuple(each.shape) for each in found if each.shape[:2] == states.shape[:2]), None):
        raise UnsupportedError(
            "Sequences are sharded where layers take hidden states alone. Found a layer, "
            f"{type(layer).__name__}, that takes another tensor of {shape} for tokens of all ranks. Use tp_size or "
            "pp_size without sequence parallelism."
        )


@final
class _GatherHiddenStates:
    """Forward hook of the last layer: gathers the tokens of all ranks."""

    def __init__(self, sp_config: SequenceParallelConfig) -> None:
        self._sp_config = sp_config

    def __call__(self, _layer: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return self._all_tokens(output[0]), *output[1:]
        return self._all_tokens(output)

    def _all_tokens(self, states: torch.Tensor) -> torch.Tensor:
        sharding = self._sp_config.sharding
        return comm.gather(states, "tp", 1, sharding.mesh) if self._sp_config.is_over_tp else sharding.gather(states)
