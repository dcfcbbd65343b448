"""Comparing a layer on a mesh with its native, which one process has whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from colossal._src.nn.layer import ParallelLayer
from colossal.cluster import ParallelMesh
from colossal.nn import gather_output, split_input
from colossal.tensor import shard
from colossal.testing import assert_close

GRIDS: dict[str, dict[str, Any]] = {
    "1d-2": {"tp": 2},
    "1d-3": {"tp": 3},
    "2d": {"tp": 4, "tp_mode": "2d"},
    "2.5d": {"tp": 8, "tp_mode": "2.5d", "tp_depth": 2},
    "3d": {"tp": 8, "tp_mode": "3d"},
}
"""The meshes on which every layer is compared."""

SMALL_GRIDS = [name if GRIDS[name]["tp"] < 8 else pytest.param(name, marks=pytest.mark.slow) for name in GRIDS]
"""Eight ranks in the slow circle only, for what linear layers and a training on eight do not share."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def redraw(native: torch.nn.Module) -> torch.nn.Module:
    """Give a module values that every rank draws alike, none of them zero or one."""
    with torch.no_grad():
        for seed, parameter in enumerate(native.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=100 + seed))
    return native


@contextmanager
def on_grid(name: str) -> Iterator[ParallelMesh]:
    with ParallelMesh(**GRIDS[name]) as mesh:
        yield mesh


def check_gradients(layer: torch.nn.Module, native: torch.nn.Module, name: str) -> None:
    """Every parameter has its part of the native's gradient."""
    assert isinstance(layer, ParallelLayer)
    own, wholes = dict(layer.named_parameters()), dict(native.named_parameters())
    assert own.keys() == wholes.keys()
    for key, whole in wholes.items():
        assert whole.grad is not None
        rank = 0 if layer.mesh is None else layer.mesh.global_rank
        expected = shard(whole.grad, layer.layouts[key], rank)
        grad = own[key].grad
        assert grad is not None
        assert_close(grad, expected, f"{name}: gradient of {key}")


def check_layer(
    layer: ParallelLayer,
    native: torch.nn.Module,
    x: torch.Tensor,
    name: str,
    *,
    features: bool | None = None,
    whole: Callable[[torch.Tensor], torch.Tensor] = gather_output,
) -> None:
    """Output, all gradients, three steps of an optimizer, and the way back, equal those of the native."""
    wanted = x.clone().requires_grad_() if x.is_floating_point() else x
    given = x.clone().requires_grad_() if x.is_floating_point() else x
    steps = [torch.optim.Adam(module.parameters(), lr=0.1) for module in (layer, native)]
    for step in range(3):
        expected = native(wanted)
        weights = draw(*expected.shape, seed=7 + step, dtype=expected.dtype)
        (expected * weights).sum().backward()
        result = whole(layer(split_input(given, features=features)))
        assert_close(result, expected.detach(), f"{name}: output")
        (result * weights).sum().backward()
        check_gradients(layer, native, name)
        if x.is_floating_point():
            assert given.grad is not None
            assert wanted.grad is not None
            assert_close(given.grad, wanted.grad, f"{name}: gradient of the input")
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    back = dict(layer.to_native().named_parameters())
    for key, parameter in native.named_parameters():
        assert_close(back[key].detach(), parameter.detach(), f"{name}: {key} after three steps")
