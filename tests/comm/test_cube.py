import pytest
import torch

from colossal import comm
from colossal.cluster import ParallelMesh
from colossal.errors import MeshError, ShapeError
from colossal.tensor import Layout, shard
from colossal.testing import assert_close, fake_world, run_processes, run_threads

CUBE = ("weight", "input", "output")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lay(text: str, shape: tuple[int, ...], mesh: ParallelMesh, rows: tuple[int, ...] = ()) -> Layout:
    groups = (rows, *((length,) for length in shape[1:])) if rows else ()
    return Layout.parse(text, shape, mesh=mesh, axes=CUBE, groups=groups)


def pieces(length: int, q: int) -> tuple[int, ...]:
    parts = [len(part) for part in torch.arange(length).chunk(q)]
    return (*parts, *[0] * (q - len(parts)))


def check_two_products(q: int, m: int, k: int, n: int, o: int) -> None:
    """The second product takes what the first one gave, without knowing it."""
    mesh = ParallelMesh(tp=q**3, tp_mode="3d")
    wholes = [draw(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(m, 2, k), (n, k), (o, n)])]
    x, first, second = wholes
    layouts = [
        lay("S01RS2", (m, 2, k), mesh),
        lay("S10S2", (n, k), mesh, pieces(n, q)),
        lay("S10S2", (o, n), mesh, pieces(o, q)),
    ]
    expected = torch.tanh(x @ first.mT) @ second.mT
    weights = draw(*expected.shape, seed=3)
    wanted = torch.autograd.grad(expected, wholes, weights)
    blocks = [
        shard(whole.detach(), layout, mesh.global_rank).requires_grad_()
        for whole, layout in zip(wholes, layouts, strict=True)
    ]
    hidden = comm.matmul_3d(blocks[0], blocks[1], n, mesh)
    result = comm.matmul_3d(torch.tanh(hidden), blocks[2], o, mesh)
    behind = lay("S01RS2", (m, 2, o), mesh)
    assert_close(result, shard(expected.detach(), behind, mesh.global_rank))
    grads = torch.autograd.grad(result, blocks, shard(weights, behind, mesh.global_rank))
    for grad, whole, layout in zip(grads, wanted, layouts, strict=True):
        assert_close(grad, shard(whole, layout, mesh.global_rank))


@pytest.mark.parametrize("sizes", [(8, 4, 8, 12), (5, 3, 7, 5), (1, 2, 3, 1), (4, 4, 16, 4)])
@pytest.mark.parametrize("q", [1, 2])
def test_two_products_equal_those_of_one_process(q, sizes) -> None:
    run_threads(check_two_products, q**3, q, *sizes)


def test_on_three_ranks_along_each_axis() -> None:
    run_threads(check_two_products, 27, 3, 10, 6, 18, 7)


def test_in_processes() -> None:
    run_processes(check_two_products, 8, 2, 5, 3, 7, 5)


@pytest.mark.parametrize("q", [2, 4])
@pytest.mark.parametrize(("m", "k", "n"), [(64, 32, 64), (16, 64, 128), (32, 16, 64)])
def test_what_is_sent_is_what_the_formula_says(q, m, k, n) -> None:
    """Forward and backward: X, W and the result once each way, and 1 / q of the result to put its axes right."""
    with fake_world(q**3), ParallelMesh(tp=q**3, tp_mode="3d"), comm.CommCounter() as counter:
        x, weight = torch.zeros(m // q**2, k // q), torch.zeros(n // q**2, k // q)
        comm.matmul_3d(x.requires_grad_(), weight.requires_grad_(), n).sum().backward()
    share, block = (q - 1) / q, 4 / q**2
    assert counter.bytes["all_gather", "input"] == share * block * m * k
    assert counter.bytes["reduce_scatter", "input"] == share * block * m * k
    assert counter.bytes["all_gather", "weight"] == share * block * k * n
    assert counter.bytes["reduce_scatter", "weight"] == share * block * k * n
    assert counter.bytes["reduce_scatter", "output"] == share * block * m * n
    assert counter.bytes["all_gather", "output"] == share * block * m * n
    assert counter.bytes["all_to_all", "input"] == 2 * share * block * m * n / q


def test_what_does_not_fit_is_refused() -> None:
    with fake_world(8), ParallelMesh(tp=8, tp_mode="3d"):
        with pytest.raises(ShapeError, match=r"Of 8 rows that are packed for 2 x 2 x 2 ranks, this one has 2. Found 3"):
            comm.matmul_3d(torch.zeros(1, 2), torch.zeros(3, 2), 8)
        with pytest.raises(ShapeError, match=r"Found \(1, 3\) and \(2, 2\), whose columns differ"):
            comm.matmul_3d(torch.zeros(1, 3), torch.zeros(2, 2), 8)
    with fake_world(4), ParallelMesh(tp=4, tp_mode="2d"), pytest.raises(MeshError, match="needs a 3D grid"):
        comm.matmul_3d(torch.zeros(2, 2), torch.zeros(2, 2), 4)
