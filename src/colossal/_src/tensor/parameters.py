"""Replace the values of tensors, on any device, without replacing the tensor objects."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from colossal._src.tensor.introspection import is_dtensor

# [Note: the same objects]
# Optimizers, hooks and placements know a parameter by its identity. torch lets `.data` go from the CPU to CUDA and XPU,
# but to no device that a package registers: there `Module.to` makes new parameters, and an optimizer that was built
# before updates the old ones, silently.

# As torch keeps them: by `.grad` and `.data`, guarded parameters look at who asks, which takes several calls in Python.
grad_of: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = torch.Tensor.grad.__set__  # type: ignore[union-attr]
values_of: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.data.__get__  # type: ignore[attr-defined]
set_values: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# how often torch has seen the values of a tensor written
version_of: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]  # noqa: SLF001 (it has no public name)


def set_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let a tensor have other values, of any shape, dtype and device."""
    inside: Any = torch
    if inside._has_compatible_shallow_copy_type(tensor, values):  # noqa: SLF001 (as Module.to asks)
        set_values(tensor, values)
        return
    made = values.detach().requires_grad_(tensor.requires_grad)
    known: Any = tensor
    hooks = known._backward_hooks, known._post_accumulate_grad_hooks  # noqa: SLF001 (no public name)
    inside._C._swap_tensor_impl(tensor, made)  # noqa: SLF001 (swap_tensors would take attributes along, and no hooks)
    known._backward_hooks, known._post_accumulate_grad_hooks = hooks  # noqa: SLF001


def move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Bring parameters, their gradients and buffers to a device, as the objects that they are; no parts of others."""
    for parameter in module.parameters():
        if parameter.device != device and not is_dtensor(parameter):
            grad = grad_of(parameter)
            set_grad(parameter, None)
            with torch.no_grad():
                set_data(parameter, parameter.detach().to(device))
            set_grad(parameter, None if grad is None else grad.to(device))
    part: Any
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.device != device:
                part.register_buffer(name, buffer.to(device), name not in part._non_persistent_buffers_set)  # noqa: SLF001 (no public name)
    return module


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Find all names of the parameters of a model, of which several may be one parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(strip_compile_prefix(name))
    return names


def strip_compile_prefix(name: str) -> str:
    """Leave out of a name what `torch.compile` adds to those of the modules that it wraps."""
    return name.replace("_orig_mod.", "")
