"""Replace the values of tensors, on any device, without replacing the tensor objects."""

from typing import Any

import torch
from torch import nn

from colossal._src.tensor.introspection import is_dtensor

# [Note: the same objects]
# Optimizers, hooks and placements know a parameter by its identity. torch lets `.data` go from the CPU to CUDA and XPU,
# but to no device that a package registers: there `Module.to` makes new parameters, and an optimizer that was built
# before updates the old ones, silently.


def set_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let a tensor have other values, of any shape, dtype and device.

    Args:
        tensor: Not part of a graph; nothing but the caller is in the middle of using it.
        values: What it is from now on; their memory is shared.

    Example:
        >>> import torch
        >>> from colossal._src.tensor import set_data
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> set_data(weight, torch.ones(3))
        >>> weight.tolist()
        [1.0, 1.0, 1.0]
    """
    inside: Any = torch
    if inside._has_compatible_shallow_copy_type(tensor, values):  # noqa: SLF001 (as Module.to asks)
        tensor.data = values
        return
    made = values.detach().requires_grad_(tensor.requires_grad)
    known: Any = tensor
    hooks = known._backward_hooks, known._post_accumulate_grad_hooks  # noqa: SLF001 (no public name)
    inside._C._swap_tensor_impl(tensor, made)  # noqa: SLF001 (swap_tensors would take attributes along, and no hooks)
    known._backward_hooks, known._post_accumulate_grad_hooks = hooks  # noqa: SLF001


def move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Bring parameters, their gradients, and buffers to a device, as the objects that they are; but no parts of others.

    Args:
        module: The module; nothing in it is lazy any more.
        device: Where it goes.

    Returns:
        The module.

    Example:
        >>> import torch
        >>> from colossal._src.tensor import move_module
        >>> layer = torch.nn.Linear(2, 3)
        >>> weight = layer.weight
        >>> move_module(layer, torch.device("cpu")).weight is weight
        True
    """
    for parameter in module.parameters():
        if parameter.device != device and not is_dtensor(parameter):
            grad, parameter.grad = parameter.grad, None
            with torch.no_grad():
                set_data(parameter, parameter.detach().to(device))
            parameter.grad = None if grad is None else grad.to(device)
    part: Any
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.device != device:
                part.register_buffer(name, buffer.to(device), name not in part._non_persistent_buffers_set)  # noqa: SLF001 (no public name)
    return module


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Find all names of the parameters of a model, of which several may be one parameter.

    Args:
        model: The model.

    Returns:
        The names of each, in the order of the model.

    Example:
        >>> from torch import nn
        >>> from colossal._src.tensor import parameter_names
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> list(parameter_names(nn.Sequential(layer, layer)).values())
        [['0.weight', '1.weight']]
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(strip_compile_prefix(name))
    return names


def strip_compile_prefix(name: str) -> str:
    """Leave out of a name what `torch.compile` adds to those of the modules that it wraps.

    Args:
        name: The name of a parameter or buffer.

    Returns:
        Its name in the model that is not compiled.

    Example:
        >>> from colossal._src.tensor import strip_compile_prefix
        >>> strip_compile_prefix("layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return name.replace("_orig_mod.", "")
