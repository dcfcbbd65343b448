"""Options of `ShardConfig` other than sharding: each is applied, or rejected."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from torch import nn

from colossal._src.shardformer.compiled_activation import check_compiled_activations, compile_activations
from colossal._src.shardformer.flash_attention import check_flash_attention, use_flash_attention
from colossal._src.shardformer.fused_norm import check_fused_norms, fuse_norms
from colossal._src.shardformer.shard_config import ShardConfig
from colossal.errors import UnsupportedError
from colossal.logging import get_dist_logger


class ModelOption(NamedTuple):
    """One option."""

    # takes a full model, returns what implements the option, and raises `UnsupportedError` if nothing does
    check: Callable[[nn.Module], str]
    apply: Callable[[nn.Module], None]  # takes a model, or a stage of it, and changes it


MODEL_OPTIONS: Mapping[str, ModelOption] = {
    "enable_flash_attention": ModelOption(check_flash_attention, use_flash_attention),
    "enable_fused_normalization": ModelOption(check_fused_norms, fuse_norms),
    "enable_jit_fused": ModelOption(check_compiled_activations, compile_activations),
}
"""The options, by the names of their keywords."""


def choose_options(model: nn.Module, config: ShardConfig) -> list[str]:
    """Find which options a model gets; reject a wrapper, whose layers are under other names than those of its class."""
    if hasattr(model, "_orig_mod"):
        raise UnsupportedError(
            "The layers of a model are sharded by their names. Found torch.compile(model), which wraps the model. "
            "Call model.compile() instead, which compiles it in place."
        )
    asked = [name for name in MODEL_OPTIONS if getattr(config, name)]
    applied = {name: MODEL_OPTIONS[name].check(model) for name in asked}
    if not config.enable_all_optimization:
        return asked
    rejected = []
    for name in [name for name in MODEL_OPTIONS if name not in asked]:
        try:
            applied[name] = MODEL_OPTIONS[name].check(model)
        except UnsupportedError as error:
            rejected.append(f"{name} is left out: {error}")
    messages = [*(f"{name}: {how}" for name, how in applied.items()), *rejected]
    get_dist_logger().info(f"{type(model).__name__}: {'; '.join(messages)}", ranks=[0])
    return [name for name in MODEL_OPTIONS if name in applied]


def apply_options(model: nn.Module, names: Collection[str]) -> None:
    """Change a model as options say."""
    for name in names:
        MODEL_OPTIONS[name].apply(model)
