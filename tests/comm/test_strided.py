"""gloo sums strided tensors up wrongly: none of the library's collectives passes one to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from colossal import comm
from colossal._src.comm import Partition
from colossal.cluster import ParallelMesh
from colossal.comm import Channel, all_reduce_over
from colossal.testing import run_processes

Way = Callable[[torch.Tensor, ParallelMesh], Any]


def broadcast(x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    Channel("dp", mesh).broadcast([x])
    return x


def summed_by_owners(x: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    partition, flat = Partition(mesh.group("dp")), x.reshape(-1)
    partition.start_reduce_scatter(flat, own := torch.empty(len(flat) // 2, dtype=flat.dtype)).wait()
    return own


def backward_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    y.backward(torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape[::-1]).t())  # a gradient that is strided
    assert leaf.grad is not None
    return leaf.grad


WAYS: dict[str, Way] = {
    "all_reduce": lambda x, mesh: Channel("dp", mesh).all_reduce(x),
    "largest": lambda x, mesh: Channel("dp", mesh).all_reduce(x, "max"),
    "all_gather": lambda x, mesh: Channel("dp", mesh).all_gather(x, 0),
    "all_gather of columns": lambda x, mesh: Channel("dp", mesh).all_gather(x, 1),
    "reduce_scatter": lambda x, mesh: Channel("dp", mesh).reduce_scatter(x, 0),
    "reduce_scatter of columns": lambda x, mesh: Channel("dp", mesh).reduce_scatter(x, 1),
    "all_to_all": lambda x, mesh: Channel("dp", mesh).all_to_all(x, 0, 1),
    "broadcast": broadcast,
    "over groups": lambda x, mesh: all_reduce_over(x, [mesh.group("dp")]),
    "by owners": summed_by_owners,
    "reduce": lambda x, mesh: comm.reduce(x, "dp", mesh),
    "back from replicate": lambda x, mesh: backward_of(lambda y: comm.replicate(y, "dp", mesh), x),
    "back from gather": lambda x, mesh: backward_of(lambda y: comm.gather(y, "dp", 0, mesh, partial_grad=True), x),
    "back from scatter": lambda x, mesh: backward_of(lambda y: comm.scatter(y, "dp", 1, mesh), x),
    "back from reduce_scatter": lambda x, mesh: backward_of(lambda y: comm.reduce_scatter(y, "dp", 0, mesh), x),
    "back from all_to_all": lambda x, mesh: backward_of(lambda y: comm.all_to_all(y, "dp", 0, 1, mesh), x),
}


def values(rank: int) -> torch.Tensor:
    return torch.arange(24, dtype=torch.float64).view(4, 6).add(100 * rank).sin()


def of_all_ways() -> dict[str, list[torch.Tensor]]:
    """Each way of a strided tensor, and of a contiguous one of the same values."""
    with ParallelMesh(dp=2) as mesh:
        assert dist.get_backend(mesh.group("dp")) == "gloo"
        x = values(mesh.rank("dp"))
        strided = x.t().contiguous().t()
        assert not strided.is_contiguous()
        return {name: [way(strided.clone(memory_format=torch.preserve_format), mesh), way(x.clone(), mesh)]
                for name, way in WAYS.items()}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[torch.Tensor]]]:
    return run_processes(of_all_ways, 2, environment={"COLOSSAL_BACKEND": "gloo"}, fresh=True)


@pytest.mark.parametrize("name", WAYS)
def test_a_strided_tensor_gives_what_a_contiguous_one_gives(name: str, ranks) -> None:
    for found in ranks:
        strided, contiguous = found[name]
        torch.testing.assert_close(strided, contiguous, rtol=0, atol=0)


def test_the_sum_is_right(ranks) -> None:
    for found in ranks:
        torch.testing.assert_close(found["all_reduce"][0], values(0) + values(1))
