"""The backward pass of distributed tensors, which is that of their local values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from colossal._src.tensor import local_operations

BACKWARD_PASSES = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""What begins one."""


def run_backward(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[torch.Tensor]) -> Any:
    """Go backward from tensors of a kind, with their operations, which recomputed activations run again."""
    named = dict(kwargs)
    inputs = {"inputs": _edges(named.pop("inputs"), kind)} if named.get("inputs") is not None else {}
    if func is torch.autograd.grad and len(args) > 1:
        args = (args[0], _edges(args[1], kind), *args[2:])
    return func(*_plain(args, kind), **{name: _plain(value, kind) for name, value in named.items()}, **inputs)


def _plain(value: Any, kind: type[torch.Tensor]) -> Any:
    """Replace the tensors that a backward pass begins at by plain ones of the same graph."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.autograd.graph.GradientEdge):
        return tuple(_plain(item, kind) for item in value)
    if not isinstance(value, kind):
        return value
    with local_operations():
        return value.as_subclass(torch.Tensor)


def _edges(value: Any, kind: type[torch.Tensor]) -> Any:
    """Replace the tensors that a backward pass ends at by their edges of the graph, which run no operations."""
    if isinstance(value, list | tuple):
        return tuple(_edges(item, kind) for item in value)
    with local_operations():
        return torch.autograd.graph.get_gradient_edge(value) if isinstance(value, kind) else value
