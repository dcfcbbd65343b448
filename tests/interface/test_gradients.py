# pyright: reportArgumentType=false
"""Norms and limits of gradients that ranks share, against those of whole tensors."""

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.utils import get_total_norm

from colossal._src.interface import Peers
from colossal._src.interface.gradients import clamp, scale, total_norm
from colossal._src.tensor import set_placement
from colossal.errors import UnsupportedError
from colossal.tensor import Layout
from colossal.tensor import Placement as OurPlacement
from colossal.testing import run_processes, run_threads

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
    changed = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in own]
    return {"norms": norms, "large": large, "refused": refused, "changed": changed}


def test_each_element_counts_once_however_ranks_share_it() -> None:
    expected = [get_total_norm(wholes(), norm_type).item() for norm_type in NORMS]
    for found in run_processes(measure, 4):
        assert found["norms"] == pytest.approx(expected, rel=1e-5)
        assert found["large"] == pytest.approx(LARGE * 32**0.5, rel=1e-5)
        assert "Found norm_type=0.0" in found["refused"]
        for grad, whole in zip(found["changed"], wholes(), strict=True):
            assert torch.equal(grad, (0.5 * whole).clamp(-0.25, 0.25))


# ---------------------------------------------------------------------------------------------- stages of a pipeline


def measure_stages() -> list[float]:
    """Ranks 0 and 1 shard the parameters of one stage, ranks 2 and 3 those of another; both have a tied one."""
    rank = dist.get_rank()
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage, place = divmod(rank, 2)
    own, tied = stage_grads()[stage], stage_grads()[-1]
    layout = Layout((6, 4), (2 * stage, 2 * stage + 1), dims=((0,), ()))
    sharded = set_placement(with_grad(own.chunk(2)[place]), OurPlacement(layout, rank, (stages[stage],)))
    copy = with_grad(tied)
    set_placement(copy, OurPlacement(Layout((5,), (rank,)), rank, is_counted=stage == 0))
    peers = Peers((across[place],), torch.device("cpu"))
    return [total_norm([sharded, copy], norm_type, peers).item() for norm_type in NORMS]


def stage_grads() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((6, 4), (6, 4), (5,))]


def test_a_tied_parameter_counts_once_and_other_stages_count() -> None:
    expected = [get_total_norm(stage_grads(), norm_type).item() for norm_type in NORMS]
    for found in run_threads(measure_stages, 4):
        assert found == pytest.approx(expected, rel=1e-12)


def measure_empty_stage() -> float:
    """Rank 1 has no parameter."""
    peers = Peers((dist.group.WORLD,), torch.device("cpu"))
    return total_norm([with_grad(torch.full((4,), 3.0))] if dist.get_rank() == 0 else [], 2.0, peers).item()


def test_a_rank_without_parameters_takes_part() -> None:
    assert run_threads(measure_empty_stage, 2) == [6.0, 6.0]
