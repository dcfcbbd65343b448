# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
import inspect
import re

import pytest
import torch

from colossal import comm
from colossal.cluster import ParallelMesh
from colossal.comm import Channel, CommCounter
from colossal.errors import MeshError, ShapeError
from colossal.testing import assert_close, fake_world, run_processes, run_threads

SIZE = 4


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(mesh: ParallelMesh, *shape: int) -> torch.Tensor:
    return draw(*shape, seed=1 + mesh.rank("tp")).requires_grad_()


def all_of(*shape: int) -> list[torch.Tensor]:
    return [draw(*shape, seed=1 + rank) for rank in range(SIZE)]


def check_replicate() -> None:
    mesh = ParallelMesh(tp=SIZE)
    x = draw(3, 8).requires_grad_()
    y = comm.replicate(x, "tp", mesh)
    assert_close(y, x)
    y.backward(own(mesh, 3, 8).detach())
    assert_close(x.grad, sum(all_of(3, 8)))


def check_reduce() -> None:
    mesh = ParallelMesh(tp=SIZE)
    x = own(mesh, 3, 8)
    y = comm.reduce(x, "tp", mesh)
    assert_close(y, sum(all_of(3, 8)))
    y.backward(draw(3, 8))
    assert_close(x.grad, draw(3, 8))


def check_gather(dim: int) -> None:
    mesh = ParallelMesh(tp=SIZE)
    x = own(mesh, 4, 8)
    y = comm.gather(x, "tp", dim, mesh)
    assert_close(y, torch.cat(all_of(4, 8), dim))
    grad = draw(*y.shape)
    y.backward(grad)
    assert_close(x.grad, grad.chunk(SIZE, dim)[mesh.rank("tp")])


def check_gather_with_partial_gradients(dim: int) -> None:
    mesh = ParallelMesh(tp=SIZE)
    x = own(mesh, 4, 8)
    y = comm.gather(x, "tp", dim, mesh, partial_grad=True)
    y.backward(own(mesh, *y.shape).detach())
    assert_close(x.grad, sum(all_of(*y.shape)).chunk(SIZE, dim)[mesh.rank("tp")])


def check_scatter(dim: int) -> None:
    mesh = ParallelMesh(tp=SIZE)
    x = draw(4, 8).requires_grad_()
    y = comm.scatter(x, "tp", dim, mesh)
    assert_close(y, x.chunk(SIZE, dim)[mesh.rank("tp")])
    y.backward(own(mesh, *y.shape).detach())
    assert_close(x.grad, torch.cat(all_of(*y.shape), dim))


def check_reduce_scatter(dim: int) -> None:
    mesh = ParallelMesh(tp=SIZE)
    x = own(mesh, 4, 8)
    y = comm.reduce_scatter(x, "tp", dim, mesh)
    assert_close(y, sum(all_of(4, 8)).chunk(SIZE, dim)[mesh.rank("tp")])
    y.backward(own(mesh, *y.shape).detach())
    assert_close(x.grad, torch.cat(all_of(*y.shape), dim))


def check_all_to_all(split_dim: int, join_dim: int) -> None:
    mesh = ParallelMesh(tp=SIZE)
    x = own(mesh, 4, 8)
    y = comm.all_to_all(x, "tp", split_dim, join_dim, mesh)
    rank = mesh.rank("tp")
    assert_close(y, torch.cat([other.chunk(SIZE, split_dim)[rank] for other in all_of(4, 8)], join_dim))
    y.backward(own(mesh, *y.shape).detach())
    assert_close(x.grad, torch.cat([g.chunk(SIZE, join_dim)[rank] for g in all_of(*y.shape)], split_dim))


WITH_DIM = (check_gather, check_gather_with_partial_gradients, check_scatter, check_reduce_scatter)
CASES = [
    (check_replicate, ()),
    (check_reduce, ()),
    *[(check, (dim,)) for check in WITH_DIM for dim in (0, 1, -1)],
    *[(check_all_to_all, dims) for dims in ((0, 1), (1, 0), (-1, 0))],
]


@pytest.mark.parametrize(("check", "args"), CASES)
def test_forward_and_backward_equal_the_dense_computation(check, args) -> None:
    run_threads(check, SIZE, *args)


def check_all_cases() -> None:
    for check, args in CASES:
        check(*args)


def test_the_same_holds_over_gloo() -> None:
    run_processes(check_all_cases, SIZE)


def check_second_derivative() -> None:
    mesh = ParallelMesh(tp=SIZE)
    x = draw(4).requires_grad_()
    cube = comm.reduce(comm.replicate(x, "tp", mesh) ** 3, "tp", mesh).sum()
    (grad,) = torch.autograd.grad(cube, x, create_graph=True)
    assert_close(grad, SIZE * 3 * x**2)
    grad.sum().backward()
    assert_close(x.grad, SIZE * 6 * x)
    own_part = own(mesh, 2)
    square = comm.gather(own_part, "tp", 0, mesh, partial_grad=True) ** 2
    (grad,) = torch.autograd.grad(square.sum(), own_part, create_graph=True)
    assert_close(grad, SIZE * 2 * own_part)
    (second,) = torch.autograd.grad(grad.sum(), own_part)
    assert_close(second, torch.full((2,), 2.0 * SIZE, dtype=torch.float64))


def test_a_gradient_can_be_differentiated_again() -> None:
    run_threads(check_second_derivative, SIZE)


def combine() -> tuple[list[float], list[float]]:
    channel = Channel("tp", ParallelMesh(tp=SIZE))
    found = torch.tensor([float(channel.rank), -1.0])
    return channel.all_reduce(found).tolist(), channel.all_reduce(found, "max").tolist()


def test_a_total_is_a_sum_or_the_largest() -> None:
    assert run_threads(combine, SIZE) == [([6.0, -4.0], [3.0, -1.0])] * SIZE


def test_one_rank_needs_no_communication() -> None:
    with fake_world(1), CommCounter() as counter:
        x = draw(4, 8).requires_grad_()
        for y in (
            comm.replicate(x, "tp"),
            comm.reduce(x, "tp"),
            comm.gather(x, "tp", 0),
            comm.scatter(x, "tp", 0),
            comm.reduce_scatter(x, "tp", 1),
            comm.all_to_all(x, "tp", 0, 1),
        ):
            assert torch.equal(y, x)
        assert not counter.calls


COUNTS = {
    "replicate": (lambda x: comm.replicate(x, "tp"), {}, {"all_reduce": 2}),
    "reduce": (lambda x: comm.reduce(x, "tp"), {"all_reduce": 2}, {}),
    "gather": (lambda x: comm.gather(x, "tp", 0), {"all_gather": 4}, {}),
    "gather, partial_grad": (
        lambda x: comm.gather(x, "tp", 1, partial_grad=True),
        {"all_gather": 4},
        {"reduce_scatter": 4},
    ),
    "scatter": (lambda x: comm.scatter(x, "tp", 0), {}, {"all_gather": 1}),
    "reduce_scatter": (lambda x: comm.reduce_scatter(x, "tp", 0), {"reduce_scatter": 1}, {"all_gather": 1}),
    "all_to_all": (lambda x: comm.all_to_all(x, "tp", 0, 1), {"all_to_all": 1}, {"all_to_all": 1}),
}


@pytest.mark.parametrize("name", COUNTS)
def test_calls_and_bytes_are_counted_with_the_forward_pass(name) -> None:
    function, ahead, back = COUNTS[name]
    x = torch.zeros(8, 8, requires_grad=True)
    unit = 8 * 8 * 4 * 3 // 4
    with fake_world(SIZE), ParallelMesh(tp=SIZE):
        with CommCounter() as outer, CommCounter() as counter:
            y = function(x)
        assert counter.bytes == {(op, "tp"): times * unit for op, times in ahead.items()}
        y.backward(torch.zeros_like(y))
    expected = {(op, "tp"): (ahead.get(op, 0) + back.get(op, 0)) * unit for op in ahead | back}
    assert counter.bytes == outer.bytes == expected
    assert sum(counter.calls.values()) == len(ahead) + len(back)
    assert all(op in str(counter) for op, _ in expected)


@pytest.mark.parametrize("name", ["replicate", "reduce", "gather", "scatter", "reduce_scatter", "all_to_all"])
def test_the_documented_communication_is_what_is_counted(name) -> None:
    paragraph = inspect.getdoc(getattr(comm, name)).partition("Communication: ")[2].partition("\n\n")[0]
    text = " ".join(paragraph.split())
    forward, _, backward = text.partition(";")
    _, ahead, back = COUNTS[name]
    _, _, back_if_partial = COUNTS.get(f"{name}, partial_grad", (None, {}, {}))
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert (op in forward) == (op in ahead)
        assert (op in backward) == (op in back | back_if_partial)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: comm.scatter(x, "tp", 1), "dimension 1 of shape (4, 6)"),
        (lambda x: comm.reduce_scatter(x, "tp", 1), "dimension 1 of shape (4, 6)"),
        (lambda x: comm.all_to_all(x, "tp", 1, 0), "dimension 1 of shape (4, 6)"),
        (lambda x: comm.gather(x, "tp", 2), "dim=2 for shape (4, 6)"),
        (lambda x: comm.all_to_all(x, "tp", 0, 5), "dim=5 for shape (4, 6)"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_before_any_communication(function, found) -> None:
    with fake_world(SIZE), ParallelMesh(tp=SIZE), CommCounter() as counter:
        with pytest.raises(ShapeError, match=re.escape(found)):
            function(torch.zeros(4, 6))
        assert not counter.calls


def test_an_axis_that_does_not_exist_is_refused() -> None:
    with fake_world(2), pytest.raises(MeshError, match="Found 'model'"):
        Channel("model")
