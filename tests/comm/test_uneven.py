# pyright: reportArgumentType=false
"""Dimensions that do not divide by the number of ranks: parts as torch.chunk cuts them, some of them empty."""

import pytest
import torch

from colossal import comm
from colossal.cluster import ParallelMesh
from colossal.comm import Channel
from colossal.errors import ShapeError
from colossal.testing import assert_close, fake_world, run_processes, run_threads

SIZE = 3
LENGTHS = (7, 4, 2, 1, 6)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    parts = whole.chunk(SIZE, dim)
    return parts[rank].contiguous() if rank < len(parts) else whole.narrow(dim, 0, 0).contiguous()


def check_gather_and_scatter() -> None:
    mesh = ParallelMesh(tp=SIZE)
    rank = mesh.rank("tp")
    for dim, length in ((dim, length) for dim in (0, 1, -1) for length in LENGTHS):
        shape = [2, 2, 2]
        shape[dim] = length
        whole, weights = draw(*shape), [draw(*shape, seed=1 + other) for other in range(SIZE)]
        given = part(whole, dim, rank).requires_grad_()
        assert_close(comm.gather(given, "tp", dim, mesh, length=length), whole)
        comm.gather(given, "tp", dim, mesh, length=length).backward(weights[0])
        assert_close(given.grad, part(weights[0], dim, rank))
        given.grad = None
        comm.gather(given, "tp", dim, mesh, length=length, partial_grad=True).backward(weights[rank])
        assert_close(given.grad, part(sum(weights), dim, rank))
        copy = whole.clone().requires_grad_()
        kept = comm.scatter(copy, "tp", dim, mesh, uneven=True)
        assert_close(kept, part(whole, dim, rank))
        kept.backward(part(weights[0], dim, rank))
        assert_close(copy.grad, weights[0])
        summand = weights[rank].clone().requires_grad_()
        summed = comm.reduce_scatter(summand, "tp", dim, mesh, uneven=True)
        assert_close(summed, part(sum(weights), dim, rank))
        summed.backward(part(whole, dim, rank))
        assert_close(summand.grad, whole)
        assert Channel("tp", mesh).lengths(given.shape[dim]) == [part(whole, dim, i).shape[dim] for i in range(SIZE)]


def check_all_to_all() -> None:
    mesh = ParallelMesh(tp=SIZE)
    rank = mesh.rank("tp")
    for rows, columns in ((rows, columns) for rows in LENGTHS for columns in LENGTHS):
        whole, weights = draw(rows, 2, columns), draw(rows, 2, columns, seed=1)
        given = part(whole, -1, rank).requires_grad_()
        moved = comm.all_to_all(given, "tp", 0, -1, mesh, join_length=columns)
        assert_close(moved, part(whole, 0, rank))
        moved.backward(part(weights, 0, rank))
        assert_close(given.grad, part(weights, -1, rank))


@pytest.mark.parametrize("check", [check_gather_and_scatter, check_all_to_all])
def test_parts_and_gradients(check) -> None:
    run_threads(check, SIZE)


def test_in_processes() -> None:
    run_processes(check_all_to_all, SIZE)


def test_what_is_not_this_rank_s_part_is_refused() -> None:
    with fake_world(SIZE, rank=2):
        mesh = ParallelMesh(tp=SIZE)
        with pytest.raises(ShapeError, match=r"A dimension of 7 .* has 1 on rank 2. Found dimension 0 of shape \(3,\)"):
            comm.gather(torch.zeros(3), "tp", 0, mesh, length=7)
        with pytest.raises(ShapeError, match=r"A dimension of 7 .* has 1 on rank 2. Found dimension 1"):
            comm.all_to_all(torch.zeros(3, 3), "tp", 0, 1, mesh, join_length=7)
        with pytest.raises(ShapeError, match="must be a multiple of 3"):
            comm.scatter(torch.zeros(7), "tp", 0, mesh)
