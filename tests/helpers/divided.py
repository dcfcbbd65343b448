"""What ranks have of a divided model, put together, and compared with one process."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from equality import assert_equal
from families import inputs_of, results_of
from torch import nn

from colossal.cluster import ParallelMesh
from colossal.comm import Channel
from colossal.tensor import Layout, relayout


def layouts_of(model: nn.Module) -> dict[int, Layout]:
    """How the parameters lie that are divided, by their ids."""
    return {
        id(module.get_parameter(name)): layout
        for module in model.modules()
        for name, layout in getattr(module, "layouts", {}).items()
    }


def whole(value: torch.Tensor, layout: Layout | None, mesh: ParallelMesh) -> torch.Tensor:
    """Put a tensor together."""
    return value if layout is None else relayout(value, layout, replace(layout, dims=()), mesh)


def whole_grads(model: nn.Module, mesh: ParallelMesh) -> dict[str, torch.Tensor | None]:
    """Put gradients together, averaged over ranks that share sequences."""
    layouts, found = layouts_of(model), dict[str, torch.Tensor | None]()
    for name, parameter in model.named_parameters():
        found[name] = None
        if parameter.grad is not None:
            mean = Channel("sp", mesh).all_reduce(parameter.grad) / mesh.size("sp")
            found[name] = whole(mean, layouts.get(id(parameter)), mesh)
    return found


def whole_parameters(model: nn.Module, mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    """The parameters of a rank by their names in the whole model, those that tp divides put together."""
    stages, found = getattr(model, "stages", None), dict[str, torch.Tensor]()
    for module in [model] if stages is None else [stage.module for stage in stages]:
        layouts = layouts_of(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found[name] = whole(parameter.detach(), layouts.get(id(parameter)), mesh)
    return found


def assert_grads(found: Mapping[str, torch.Tensor | None], alone: nn.Module, at: str = "") -> None:
    """Compare every gradient with one process, in float64."""
    expected = {key: parameter.grad for key, parameter in alone.named_parameters()}
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        value = found[key]
        if value is None or grad is None:
            assert value is grad, f"{at}{key}: only one of the two has a gradient"
        else:
            assert_equal(value, grad, f"{at}{key}")


def assert_trained(
    ranks: Iterable[tuple[torch.Tensor, Mapping[str, torch.Tensor | None]]], alone: nn.Module, at: str
) -> None:
    """Compare the loss and all gradients of ranks, of the inputs of Llama, with one process, in float64."""
    loss, _ = results_of(alone, inputs_of("llama"))
    loss.backward()
    for found, grads in ranks:
        assert_equal(found, loss.detach(), f"{at}: loss")
        assert_grads(grads, alone, f"{at}: ")
