# pyright: reportReturnType=false
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import all_layouts, layouts

from colossal.cluster import ParallelMesh, current_mesh
from colossal.comm import CommCounter
from colossal.errors import MeshError, PlanError, ShapeError
from colossal.tensor import Layout, plan_relayout, relayout, shard, unshard
from colossal.testing import fake_world, run_processes, run_threads

AXES = ("dp", "tp")


def named(layout: Layout, mesh: ParallelMesh) -> Layout:
    return replace(layout, ranks=mesh.ranks(*AXES), axes=AXES)


def summands(layout: Layout, rank: int) -> torch.Tensor:
    """What a rank holds; summands that differ, and are the same on ranks that hold the same."""
    place = layout.coordinate_of(rank)
    seed = sum(100**i * place[axis] for i, axis in enumerate(layout.partial))
    whole = torch.randint(0, 1000, layout.shape, generator=torch.Generator().manual_seed(seed)).double()
    return shard(whole, replace(layout, partial=()), rank)


def convert(grid: tuple[int, int], source: Layout, target: Layout) -> dict[str, tuple[int, torch.Tensor]]:
    mesh = ParallelMesh(dp=grid[0], tp=grid[1])
    source, target = named(source, mesh), named(target, mesh)
    rank = mesh.global_rank
    part = summands(source, rank).requires_grad_()
    with CommCounter() as counter:
        result = relayout(part, source, target, mesh)
        sent = sum(counter.bytes.values())  # before the way back, which is counted too
    result.backward(shard(weights(target.shape), replace(target, partial=()), rank))
    return {"result": result.detach(), "grad": part.grad, "sent": sent, "part": part.detach()}


def weights(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def check(grid: tuple[int, int], source: Layout, target: Layout) -> list[dict]:
    found = run_threads(convert, math.prod(grid), grid, source, target)
    source, target = (replace(each, ranks=tuple(range(math.prod(grid)))) for each in (source, target))
    whole = unshard({rank: each["part"] for rank, each in enumerate(found)}, source)
    assert torch.equal(unshard({rank: each["result"] for rank, each in enumerate(found)}, target), whole)
    for rank, each in enumerate(found):
        assert tuple(each["result"].shape) == target.local_shape(rank)
        if not target.partial:
            assert torch.equal(each["result"], shard(whole, target, rank))
        assert torch.equal(each["grad"], shard(weights(source.shape), replace(source, partial=()), rank))
    return found


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_rank_gets_its_part_and_its_gradient(data: st.DataObject) -> None:
    grid = data.draw(st.sampled_from([(2, 2), (2, 3), (3, 1), (1, 2)]))
    source = data.draw(layouts(grid=grid, is_packed=True, is_partial=True))
    target = data.draw(layouts(source.shape, grid))
    kept = data.draw(st.sets(st.sampled_from(source.partial))) if source.partial else set()
    dims = tuple(tuple(axis for axis in axes if axis not in kept) for axes in target.dims)
    check(grid, source, replace(source, dims=dims, partial=tuple(kept)))


def test_all_pairs_send_what_was_planned() -> None:
    every = all_layouts((4, 8), (2, 2), (1,))
    for source in every:
        for target in every[:: max(1, len(every) // 6)]:
            if {*target.partial} <= {*source.partial}:
                path = plan_relayout(replace(source), replace(target), itemsize=8)
                assert {each["sent"] for each in check((2, 2), source, target)} == {path.num_bytes}


def convert_in_processes(texts: list[str]) -> None:
    mesh = ParallelMesh(dp=2, tp=2)
    whole = weights((5, 6, 7))
    for source, target in pairwise(texts):
        before, after = (Layout.parse(text, (5, 6, 7), mesh=mesh, axes=AXES) for text in (source, target))
        part = relayout(shard(whole, before, mesh.global_rank), before, after, mesh)
        assert torch.equal(part, shard(whole, after, mesh.global_rank)), (source, target)


def test_processes_do_the_same() -> None:
    run_processes(convert_in_processes, 4, ["RRR", "S01RR", "RS01R", "S1S0R", "RRS10", "S0RS1", "S10RR", "RRR"])


def twice_differentiable() -> None:
    mesh = ParallelMesh(tp=2)
    rows, columns = (Layout.parse(text, (4, 4), mesh=mesh, axes=["tp"]) for text in ("S0R", "RS0"))
    part = shard(weights((4, 4)), rows, mesh.global_rank).requires_grad_()
    (grad,) = torch.autograd.grad((relayout(part, rows, columns, mesh) ** 3).sum(), part, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), part)
    assert torch.allclose(second, 6 * part)


def test_gradients_have_gradients() -> None:
    run_threads(twice_differentiable, 2)


def test_equal_layouts_cost_nothing() -> None:
    with fake_world(2), ParallelMesh(tp=2) as mesh:
        layout = Layout.parse("S0", (4,), mesh=mesh, axes=["tp"])
        part = torch.zeros(2)
        assert relayout(part, layout, layout) is part


def test_what_does_not_fit_is_refused() -> None:
    with fake_world(4):
        mesh = ParallelMesh(dp=2, tp=2)
        layout = Layout.parse("S0R", (4, 4), mesh=mesh, axes=["tp"])
        target = Layout.parse("RS0", (4, 4), mesh=mesh, axes=["tp"])
        with mesh, pytest.raises(ShapeError, match=r"\(2, 4\) on rank 0. Found \(4, 4\)"):
            relayout(torch.zeros(4, 4), layout, target)
        with mesh, pytest.raises(MeshError, match="which the layout names"):
            relayout(torch.zeros(2, 4), replace(layout, axes=()), target)
        with mesh, pytest.raises(MeshError, match="which the layout names"):
            relayout(torch.zeros(2, 4), replace(layout, ranks=(0, 2)), target)
        with mesh, pytest.raises(PlanError, match="shape"):
            relayout(torch.zeros(2, 4), layout, Layout.parse("RS0", (4, 8), mesh=mesh, axes=["tp"]))
        assert current_mesh().size("tp") == 1
