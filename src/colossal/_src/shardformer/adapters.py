"""Linear layers with low-rank adapters, sharded along the tp axis.

An adapter is a product of two thin layers, A and B. One of them has its outer dimension on the sharded side of the
adapted layer, and is sharded like the layer; the other one stays replicated.
"""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from colossal._src.interface import saved_copies
from colossal._src.shardformer.styles import EXPERT_STYLES, STYLES, StyleContext
from colossal.errors import PlanError

# The styles of A, from the features of the input, and of B, to those of the output; None where it stays replicated.
# [Note: adapters of colwise_no_reduce] Where the gradient of the input of a layer is all-reduced elsewhere, that of A,
# which is computed from it, is a partial sum too.
_THIN: Mapping[str, tuple[str | None, str | None]] = {
    **{
        style: (None, style)
        for style in (
            "colwise",
            "packed_colwise(2)",
            "packed_colwise(3)",
            "colwise_gather_output",
            "colwise_kv",
            "lm_head",
        )
    },
    "colwise_no_reduce": ("replicated_with_grad_allreduce", "colwise_no_reduce"),
    "rowwise": ("rowwise", None),
    "rowwise_split_input": ("rowwise_split_input", None),
}


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer of peft around one of the model, without importing peft."""
    # If nothing has imported peft, no module can be one of its layers.
    peft = sys.modules.get("peft.tuners.tuners_utils")
    return peft is not None and isinstance(module, peft.BaseTunerLayer)


def layers_inside(module: nn.Module) -> list[nn.Module]:
    """Return the layers of the model in a module of peft, the original first and then its copies; or the module."""
    wrapper: Any = module
    if copies := saved_copies(module):
        return [wrapper.original_module, *copies]
    return [getattr(wrapper, "base_layer", module)]


def shard_copied_layer(_name: str, module: nn.Module, style: str, context: StyleContext) -> nn.Module:
    """Shard a layer that peft's `modules_to_save` names, and the copies of it that are trained, in place."""
    wrapper: Any = module
    wrapper.original_module = STYLES[style](wrapper.original_module, context)
    for key in list(wrapper.modules_to_save):
        wrapper.modules_to_save[key] = STYLES[style](wrapper.modules_to_save[key], context)
    return module


def shard_adapted_layer(name: str, module: nn.Module, style: str, context: StyleContext) -> nn.Module:
    """Shard a layer and its adapters, in place."""
    layer: Any = module
    thin = [getattr(layer, side, {}) for side in ("lora_A", "lora_B")]
    is_plain = all(type(each) is nn.Linear for side in thin for each in side.values()) and thin[0]
    if style == "replicate" and is_plain:
        return STYLES[style](module, context)
    if style in EXPERT_STYLES:
        raise PlanError(
            "Experts are sharded over ranks as they are, without low-rank adapters. Found adapters of "
            f"{name}, on {context.mesh}. Adapt attention and routers only, name the experts in modules_to_save to "
            "train all of their parameters, or pass ep_size=1 and tp_size=1."
        )
    if style not in _THIN or not is_plain or getattr(layer, "lora_variant", None):
        raise PlanError(
            "Low-rank adapters are sharded with linear layers of the styles "
            f"{', '.join(map(repr, (*_THIN, 'replicate')))}. Found {name}, a {type(module).__name__} "
            f"around {type(layer.base_layer).__name__} of the style {style!r}"
            f"{', with a variant of LoRA' if getattr(layer, 'lora_variant', None) else ''}. Leave it out of "
            "target_modules, use plain LoRA, or train with tp_size=1."
        )
    layer.base_layer = STYLES[style](layer.base_layer, context)
    for side, side_style in zip(thin, _THIN[style], strict=True):
        for key in list(side):
            side[key] = side[key] if side_style is None else STYLES[side_style](side[key], context)
    return module
