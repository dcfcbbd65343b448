"""A model entirely in half precision: what is cast, and what must not be."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from colossal._src.tensor import grad_of, set_grad

_LEAVES = (torch.Tensor, int, float, str)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors inside of nested containers."""
    # torch walks any container, such as outputs of transformers, in ten times the time of these, which most batches are
    if type(value) is dict:
        return {key: cast_floats(each, dtype) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)([cast_floats(each, dtype) for each in value])
    if value is None or isinstance(value, _LEAVES):
        return _cast(value, dtype)
    return tree_map(partial(_cast, dtype=dtype), value)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def castable_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that may be in half precision: all but those next to running statistics.

    [Note: running statistics] A running mean moves by a tenth of a small difference; in float16 it would stop moving,
    and a variance above 65504 would be infinite. torch's kernels take half-precision inputs next to float32 statistics
    if weight and bias are float32 as well. Normalizations without such statistics compute in float32 inside.
    """
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if not _has_statistics(module) else ():
            if parameter.is_floating_point() and parameter not in seen:
                seen.add(parameter)
                yield parameter


def cast_model(model: nn.Module, dtype: torch.dtype, parameters: Iterable[nn.Parameter] | None = None) -> None:
    """Cast a model in place: its parameters, and the buffers that its state dict holds.

    Running statistics stay, as the note above says. Buffers outside of the state dict stay too: they are constants
    that a module computes by itself, such as the frequencies of rotary embeddings, and that it uses in their type.
    """
    for parameter in castable_parameters(model) if parameters is None else parameters:
        parameter.data = parameter.data.to(dtype)
        if (grad := grad_of(parameter)) is not None:
            set_grad(parameter, grad.to(dtype))
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False) if not _has_statistics(module) else ():
            if buffer.is_floating_point() and id(buffer) in saved:
                setattr(module, name, buffer.to(dtype))


def cast_inputs_and_outputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point inputs of a model on the way in, and outputs to float32 on the way out."""
    model.register_forward_pre_hook(lambda _module, args, kwargs: cast_floats((args, kwargs), dtype), with_kwargs=True)
    model.register_forward_hook(lambda _module, _args, outputs: cast_floats(outputs, torch.float32))


def _has_statistics(module: nn.Module) -> bool:
    return any(name == "running_mean" for name, _ in module.named_buffers(recurse=False))
