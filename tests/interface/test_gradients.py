"""Norms and limits of gradients that ranks share, against those of whole tensors."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn.utils import get_total_norm

from colossal.errors import UnsupportedError
from colossal.interface.gradients import clamp, scale, total_norm
from colossal.testing import run_processes

LAYOUTS: list[list[Placement]] = [
    [Shard(0), Shard(1)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(1), Replicate()],
    [Replicate(), Replicate()],
]
LARGE = 5e18  # the square of a rank's norm is within float32, their sum is not
NORMS = [1.0, 2.0, 3.0, float("inf")]


def wholes() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(8, 4, generator=draw) for _ in range(len(LAYOUTS) + 1)]


def with_grad(grad: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    return parameter


def measure() -> dict[str, Any]:
    """One parameter for each layout, and a plain one that is whole on all ranks."""
    mesh, (plain, *others) = init_device_mesh("cpu", (2, 2)), wholes()
    shared = [distribute_tensor(whole, mesh, layout) for whole, layout in zip(others, LAYOUTS, strict=True)]
    own = [with_grad(grad) for grad in (plain, *shared)]
    norms = [total_norm(own, norm_type).item() for norm_type in NORMS]
    large = total_norm([with_grad(distribute_tensor(torch.full((8, 4), LARGE), mesh, LAYOUTS[0]))], 2.0).item()
    refused = ""
    try:
        total_norm(own, 0.0)
    except UnsupportedError as error:
        refused = str(error)
    scale([p.grad for p in own if p.grad is not None], torch.tensor(0.5))
    clamp([p.grad for p in own if p.grad is not None], 0.25)
    changed = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in own]
    return {"norms": norms, "large": large, "refused": refused, "changed": changed}


def test_each_element_counts_once_however_ranks_share_it() -> None:
    expected = [get_total_norm(wholes(), norm_type).item() for norm_type in NORMS]
    for found in run_processes(measure, 4):
        assert found["norms"] == pytest.approx(expected, rel=1e-5)
        assert found["large"] == pytest.approx(LARGE * 32**0.5, rel=1e-5)
        assert "Found norm_type=0.0" in found["refused"]
        for grad, whole in zip(found["changed"], wholes(), strict=True):
            assert torch.equal(grad, (0.5 * whole).clamp(-0.25, 0.25))
