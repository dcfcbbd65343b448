"""Norms, gates and rotary embeddings of a model that an engine has loaded, each in one pass of own code on CPUs.

[Note: which modules are recognized]
Modeling files of transformers are generated from each other: in most families norms, feed-forward layers and
`apply_rotary_pos_emb` have the code of those of Llama. What has that code computes that, whatever its family is called.
Everything else stays as it is. So does a call with gradients, or of tensors that own code does not read.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from colossal._src.kernel import FUSED_DTYPES, has_fused_modules, rms_norm, rotate_heads, silu_product

_ROTATE = "apply_rotary_pos_emb"


def fuse_modules(model: nn.Module) -> None:
    """Let the modules of a model that nobody else uses compute in fewer passes, where its processor has them."""
    if not has_fused_modules():
        return
    for module in model.modules():
        own = getattr(type(module), "forward", None)
        if "forward" not in vars(module) and isinstance(own, FunctionType) and (fused := _fused(own)) is not None:
            module.forward = MethodType(fused, module)


@cache
def _fused(forward: FunctionType) -> Callable[..., Any] | None:
    """What takes the place of the forward of a class."""
    for known, fused in _FUSED:
        if _has_code_of(forward, known):
            return fused
    namespace, is_known = forward.__globals__, _ROTATE in forward.__code__.co_names
    for name in (_ROTATE, "rotate_half"):
        is_known = is_known and _has_code_of(namespace.get(name), getattr(modeling_llama, name))
    if not is_known:
        return None
    arguments = forward.__name__, forward.__defaults__, forward.__closure__
    found = FunctionType(forward.__code__, {**namespace, _ROTATE: _rotate}, *arguments)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


def _has_code_of(function: Any, known: FunctionType) -> bool:
    code, of_known = getattr(function, "__code__", None), known.__code__
    return code is not None and _compared(code) == _compared(of_known)


def _compared(code: Any) -> Any:
    """What two functions compute, but for their documentation."""
    constants = [each for each in code.co_consts if not isinstance(each, str)]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _are_read(*tensors: Any) -> bool:
    """Whether own code reads tensors, which have one dtype, and nobody asks for gradients."""
    first = tensors[0]
    return (
        first.dtype in FUSED_DTYPES
        and first.numel() > 0
        and all(type(each) in _PLAIN and each.device.type == "cpu" and each.dtype == first.dtype for each in tensors)
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))
    )


_PLAIN = (torch.Tensor, nn.Parameter)


def _normalize(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if _are_read(hidden_states, module.weight):
        return rms_norm(hidden_states, module.weight, module.variance_epsilon)
    return type(module).forward(module, hidden_states)


def _feed_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    is_fused = type(module.act_fn) is type(ACT2FN["silu"]) and _are_read(gate, up)
    return module.down_proj(silu_product(gate, up) if is_fused else module.act_fn(gate) * up)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, _, length, width = q.shape
    is_fused = (
        unsqueeze_dim == 1
        and cos.shape in ((1, length, width), (rows, length, width))
        and k.shape[::2] == (rows, length)
        and k.shape[3] == width
        and width % 2 == 0
        and cos.stride() == sin.stride()
        and q.stride(3) == k.stride(3) == cos.stride(2) == 1
        and _are_read(q, k, cos, sin)
    )
    if is_fused:
        return rotate_heads(q, k, cos, sin)
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


_FUSED: list[tuple[Any, Callable[..., Any]]] = [
    (modeling_llama.LlamaRMSNorm.forward, _normalize),
    (modeling_llama.LlamaMLP.forward, _feed_forward),
]
"""What takes the place of methods with the code of another."""
