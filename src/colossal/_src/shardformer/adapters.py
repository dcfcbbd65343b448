"""Linear layers and experts with low-rank adapters, sharded along the tp and the ep axis.

An adapter is a product of two thin layers, A and B. One of them has its outer dimension on the sharded side of the
adapted layer, and is sharded like the layer; the other one stays replicated. Of experts that are sharded over ep, both
are: each rank has the adapters of its experts.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from colossal._src.interface import saved_copies
from colossal._src.nn.layer.tp import make_param_shard
from colossal._src.shardformer.styles import EXPERT_STYLES, STYLES, StyleContext
from colossal._src.tensor import Layout
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
_STYLES_OF_DORA = ("colwise", "packed_colwise(2)", "packed_colwise(3)", "colwise_no_reduce", "rowwise")


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
        return _shard_adapted_experts(name, module, style, context)
    variants = getattr(layer, "lora_variant", {})
    if style not in _THIN or not is_plain or (variants and not _are_dora(style, variants, context)):
        found = f", with a variant of LoRA ({type(next(iter(variants.values()))).__name__})" if variants else ""
        advice = "Leave it out of target_modules, use plain LoRA, or train with tp_size=1."
        if isinstance(layer.base_layer, nn.Embedding):
            advice = "Name it in modules_to_save instead of target_modules, or train with tp_size=1."
        raise PlanError(
            "Low-rank adapters are sharded with linear layers of the styles "
            f"{', '.join(map(repr, (*_THIN, 'replicate')))}, and those of DoRA with {_STYLES_OF_DORA}. Found {name}, a "
            f"{type(module).__name__} around {type(layer.base_layer).__name__} of the style {style!r}{found}. "
            f"{advice}"
        )
    sides = _THIN[style]
    if (adapted := getattr(layer, "parameter_name", None)) is not None:
        if not isinstance(layer.base_layer, nn.Linear):  # the weight of Conv1D has inputs first
            raise PlanError(
                "Adapters of parameters are sharded with the weight of a Linear that has no others. Found those of "
                f"{adapted!r} in {name}, around {type(layer.base_layer).__name__}. Name the layer in target_modules "
                "alone, or train with tp_size=1."
            )
        # the product of A and B is added to the local shard of the weight: what is replicated gets a partial sum
        sides = tuple(each or "replicated_with_grad_allreduce" for each in sides)
    layer.base_layer = STYLES[style](layer.base_layer, context)
    for side, side_style in zip(thin, sides, strict=True):
        for key in list(side):
            side[key] = side[key] if side_style is None else STYLES[side_style](side[key], context)
    for key in variants:
        from colossal._src.shardformer.sharded_dora import ShardedDora

        magnitudes = layer.lora_magnitude_vector
        magnitudes[key] = ShardedDora(magnitudes[key], layer.base_layer, layer.lora_B[key], context.mesh)
    return module


def _are_dora(style: str, variants: Mapping[str, object], context: StyleContext) -> bool:
    """Whether variants of LoRA are DoRA, and the style leaves each rank the outputs of its rows."""
    from colossal._src.shardformer.sharded_dora import is_dora

    if style == "colwise_kv" and (context.num_key_value_heads or math.inf) >= context.mesh.size("tp"):
        style = "colwise"
    return style in _STYLES_OF_DORA and all(map(is_dora, variants.values()))


def _shard_adapted_experts(name: str, module: nn.Module, style: str, context: StyleContext) -> nn.Module:
    """Shard experts and the adapters of their parameters, in place: peft wraps the module once for each parameter."""
    wrappers, experts = list[Any](), module
    while is_adapted(experts):
        wrappers.append(experts)
        experts = wrappers[-1].base_layer
    if odd := [type(each).__name__ for each in wrappers if not hasattr(each, "parameter_name")]:
        raise PlanError(
            f"Adapters of experts adapt parameters that have a row for each expert. Found {', '.join(odd)} around "
            f"{name}, a {type(experts).__name__}. Name the parameters in target_parameters, such as "
            "'mlp.experts.gate_up_proj'."
        )
    sharded: Any = STYLES[style](experts, context)
    for wrapper in wrappers:
        layout: Layout = sharded.layouts[wrapper.parameter_name]
        is_transposed = getattr(sharded, "is_transposed", False)  # whether inputs come before outputs
        for key, rank in wrapper.r.items():
            thin = wrapper.lora_A[key], wrapper.lora_B[key]
            for linear, its_layout in zip(thin, _layouts_of_adapter(layout, rank, is_transposed), strict=True):
                _shard_thin(linear, its_layout, context)
        if layout.dims[0] and len(layout.shape) == _STACKED:
            wrapper.num_experts = sharded.num_experts
            # Of a single expert peft multiplies matrices as those of a linear layer, whose outputs come first.
            wrapper.fan_in_fan_out = is_transposed and sharded.num_experts == 1
    return module


_STACKED = 3
"""Dimensions of a parameter with a matrix for each expert; of biases there are two, which peft adapts as one matrix."""


def _layouts_of_adapter(layout: Layout, rank: int, is_transposed: bool) -> tuple[Layout, Layout]:
    """Lay out A and B as the parameter of all experts that they adapt.

    In the rows of A, r follow one another for each expert; in the columns of B, the experts follow one another for each
    of r.
    """
    number, of_experts, outer, inner = layout.shape[0], layout.dims[0], *((2, 1) if is_transposed else (1, 2))
    if len(layout.shape) < _STACKED:
        number, of_experts, outer, inner = 1, (), 0, 1
    rows, columns, grid, groups = layout.shape[outer], layout.shape[inner], layout.grid, layout.groups
    a = (number * rank, columns), layout.ranks, grid, (of_experts, layout.dims[inner])
    b = (rows, rank * number), layout.ranks, grid, (layout.dims[outer], of_experts)
    return (
        Layout(*a, groups=((number * rank,), groups[inner]), axes=layout.axes),
        Layout(*b, groups=(groups[outer], (number,) * rank), axes=layout.axes),
    )


def _shard_thin(linear: nn.Linear, layout: Layout, context: StyleContext) -> None:
    if any(layout.dims):
        linear.weight = make_param_shard(linear.get_parameter("weight"), layout, context.mesh)
        linear.out_features, linear.in_features = linear.weight.shape
    elif context.mesh.size("tp") > 1:  # from the local shard of the parameter, its gradient is a partial sum
        STYLES["replicated_with_grad_allreduce"](linear, context)
