"""What ranks have of a divided model, put together."""

from dataclasses import replace

import torch
from torch import nn

from colossal.cluster import ParallelMesh
from colossal.tensor import Layout, relayout


def whole_grads(model: nn.Module, mesh: ParallelMesh) -> dict[str, torch.Tensor | None]:
    """Put gradients together."""
    layouts: dict[int, Layout] = {
        id(module.get_parameter(name)): layout
        for module in model.modules()
        for name, layout in getattr(module, "layouts", {}).items()
    }
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        layout, grad = layouts.get(id(parameter)), parameter.grad
        is_cut = layout is not None and grad is not None
        found[name] = relayout(grad, layout, replace(layout, dims=()), mesh) if is_cut else grad
    return found
