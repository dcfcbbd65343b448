# pyright: reportCallIssue=false, reportOperatorIssue=false
import itertools
import math
from heapq import heappop, heappush
from typing import Any

import pytest
import torch
from layouts import all_layouts
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Shard, init_device_mesh, placement_types
from torch.utils._python_dispatch import TorchDispatchMode

from colossal._src.tensor.relayout_path import sent_bytes
from colossal.cluster import AxisCost, Link, LinkCost
from colossal.errors import PlanError
from colossal.tensor import Layout, dtensor_placements, greedy_path, layout_difference, one_step_layouts, plan_relayout
from colossal.testing import fake_world

CUBE = (8, 8, 8)


def cube(text: str) -> Layout:
    return Layout.parse(text, CUBE, grid=(2, 2))


# ----------------------------------------------------------------------------------------- the published examples


@pytest.mark.parametrize(
    ("source", "gathered", "sharded", "exchanged", "best"),
    [
        ("S01RR", {"S0RR"}, set(), {"S0RS1", "S0S1R"}, "S0RR"),
        ("S0RR", {"RRR"}, {"S0S1R", "S0RS1", "S01RR"}, {"RS0R", "RRS0"}, "RS0R"),
        ("RS0R", {"RRR"}, {"RS01R", "S1S0R", "RS0S1"}, {"S0RR", "RRS0"}, "RS01R"),
    ],
)
def test_the_rows_of_the_table(source, gathered, sharded, exchanged, best) -> None:
    """The second row of the published table leaves out S01RR, from where the search came."""
    found = [(step.op, str(layout)) for step, layout in one_step_layouts(cube(source))]
    for op, expected in {"all_gather": gathered, "shard": sharded, "all_to_all": exchanged}.items():
        assert {text for name, text in found if name == op} == expected
    nearest = min(found, key=lambda each: layout_difference(cube(each[1]), cube("RS01R")))
    assert nearest[1] == best


def test_greedy_search_takes_the_published_way() -> None:
    path = greedy_path(cube("S01RR"), cube("RS01R"), itemsize=4)
    assert [str(layout) for layout in path.layouts] == ["S01RR", "S0RR", "RS0R", "RS01R"]
    assert path.step_bytes == (512, 512, 0)


# ------------------------------------------------------------------------------------------------ the least cost


def dijkstra(source: Layout, itemsize: int) -> dict[Layout, int]:
    """The least bytes to every layout, by a search that estimates nothing."""
    least, heap, tickets = {source: 0}, [(0, 0, source)], itertools.count(1)
    while heap:
        spent, _, layout = heappop(heap)
        if spent > least[layout]:
            continue
        for step, behind in one_step_layouts(layout):
            cost = spent + sent_bytes(layout, (layout.dims, layout.partial), step, itemsize)
            if cost < least.get(behind, math.inf):
                least[behind] = cost
                heappush(heap, (cost, next(tickets), behind))
    return least


@pytest.mark.parametrize(
    ("shape", "grid", "partial", "greedy_pays"),
    [
        ((16, 24), (2, 2), (), 1.14),
        ((16, 24), (2, 4), (), 1.376),
        ((16, 24, 32), (2, 2), (), 1.21),
        pytest.param((16, 24, 32), (2, 4), (), 1.52, marks=pytest.mark.slow),
        ((7, 5, 3), (2, 4), (), None),
        ((16, 24), (2, 2, 2), (), None),
        ((16, 24), (2, 2), (1,), None),
        ((9, 10), (2, 3), (0, 1), None),
    ],
)
def test_nothing_is_cheaper(shape, grid, partial, greedy_pays) -> None:
    layouts = all_layouts(shape, grid, partial)
    best = greedy = 0
    for source in layouts:
        least = dijkstra(source, 4)
        for target in layouts:
            if not {*target.partial} <= {*source.partial}:
                continue
            path = plan_relayout(source, target, 4)
            assert path.num_bytes == least[target], (str(source), str(target))
            assert (path.layouts[0], path.layouts[-1]) == (source, target)
            found = greedy_path(source, target, 4)
            assert path.num_bytes <= found.num_bytes
            best, greedy = best + path.num_bytes, greedy + found.num_bytes
    if greedy_pays is not None:
        assert greedy / best == pytest.approx(greedy_pays, abs=0.01)


def test_measured_links_change_the_way() -> None:
    cheap, dear = Link(alpha=1e-6, beta=1e-12), Link(alpha=1e-6, beta=1e-6)
    costs = LinkCost({"dp": AxisCost(2, cheap), "tp": AxisCost(2, dear)})
    slow = LinkCost({"dp": AxisCost(2, Link(alpha=1.0, beta=1e-12)), "tp": AxisCost(2, Link(alpha=1.0, beta=1e-12))})
    source, target = (
        Layout((16, 16, 16), grid=(2, 2), dims=dims, axes=("dp", "tp")) for dims in (((0, 1), (), ()), ((), (0, 1), ()))
    )
    by_bytes, by_time, by_calls = (plan_relayout(source, target, 4, each) for each in (None, costs, slow))
    assert by_bytes.seconds is None
    assert len([step for step in by_calls.steps if step.op != "shard"]) == 2
    assert by_bytes.num_bytes < by_calls.num_bytes
    for path, link_cost in ((by_time, costs), (by_calls, slow)):
        expected = [
            link_cost.seconds(step.op, source.axes[step.axis], 2 * sent) if step.op != "shard" else 0.0
            for step, sent in zip(path.steps, path.step_bytes, strict=True)
        ]
        assert path.step_seconds == pytest.approx(expected)
        assert path.seconds == pytest.approx(sum(expected))
    assert f"{1e6 * by_time.seconds:.1f} us" in str(by_time)


def test_what_was_found_is_remembered() -> None:
    assert plan_relayout(cube("S0RR"), cube("RS0R"), 4) is plan_relayout(cube("S0RR"), cube("RS0R"), 4)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Layout.parse("S0R", (8, 9), grid=(2,)), r"Found shape \(8, 8\) and \(8, 9\)"),
        (Layout.parse("S0R", (8, 8), grid=(4,)), r"Found ranks .*grid"),
        (Layout.parse("S0RP1", (8, 8), grid=(2, 1)), "grid"),
    ],
)
def test_layouts_of_different_tensors_are_refused(target: Layout, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_relayout(Layout.parse("RR", (8, 8), grid=(2,)), target, 4)


def test_summands_are_not_made() -> None:
    with pytest.raises(PlanError, match="makes none. Found the source RR and the target RRP0"):
        plan_relayout(*(Layout.parse(text, (8, 8), grid=(2,)) for text in ("RR", "RRP0")), 4)


# ------------------------------------------------------------------------------------------------- against DTensor


class BytesSent(TorchDispatchMode):
    """Bytes that the collectives of DTensor send, by the same ring formulas as ours."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.name(), func(*args, **(kwargs or {}))
        if name.startswith("_c10d_functional::all_gather"):
            self.total += args[0].nbytes * (args[1] - 1)
        elif name.startswith("_c10d_functional::reduce_scatter"):
            self.total += args[0].nbytes * (args[2] - 1) // args[2]
        elif name.startswith("_c10d_functional::all_reduce"):
            size = torch.distributed.get_world_size(torch.distributed.distributed_c10d._resolve_process_group(args[2]))
            self.total += 2 * args[0].nbytes * (size - 1) // size
        else:
            assert not name.startswith("_c10d_functional::all_to_all"), "counted by the function that stands for it"
        return result


def sent_by_dtensor(mesh, source: Layout, target: Layout, monkeypatch) -> int:
    """What `redistribute` sends on GPUs; on CPUs it takes an all-gather in the place of each all-to-all."""
    exchanged = []

    def exchange(
        tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
    ) -> torch.Tensor:
        size = mesh.size(mesh_dim)
        exchanged.append(tensor.nbytes * (size - 1) // size)
        return torch.cat([tensor] * size, gather_dim).chunk(size, shard_dim)[0].contiguous()

    monkeypatch.setattr(placement_types, "shard_dim_alltoall", exchange)
    local = torch.zeros(source.local_shape(0))
    stride = torch.empty(source.shape, device="meta").stride()
    tensor = DTensor.from_local(
        local, mesh, dtensor_placements(source), run_check=False, shape=torch.Size(source.shape), stride=stride
    )
    with BytesSent() as sent:
        assert tensor.redistribute(placements=dtensor_placements(target)).to_local().shape == target.local_shape(0)
    return sent.total + sum(exchanged)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "grid", "partial", "saved"),
    [
        ((16, 16), (2, 2), (0, 1), 0.16),
        ((16, 16), (2, 4), (0, 1), 0.28),
        ((16, 16), (2, 2, 2), (0, 1, 2), 0.34),
        ((16, 16, 16), (2, 2), (0, 1), 0.19),
        ((16, 16, 16), (2, 4), (0, 1), 0.34),
        ((16, 16, 16), (2, 2, 2), (), 0.35),
    ],
)
def test_never_more_than_dtensor(shape, grid, partial, saved, monkeypatch) -> None:
    ours = theirs = 0
    with fake_world(math.prod(grid)):
        mesh = init_device_mesh("cpu", grid)
        known = [each for each in all_layouts(shape, grid, partial) if is_known_to_dtensor(each)]
        for source, target in itertools.product(known, known):
            if target.partial:
                continue
            mine = plan_relayout(source, target, 4).num_bytes
            others = sent_by_dtensor(mesh, source, target, monkeypatch)
            assert mine <= others, (str(source), str(target))
            ours, theirs = ours + mine, theirs + others
    assert 1 - ours / theirs >= saved, 1 - ours / theirs


def is_known_to_dtensor(layout: Layout) -> bool:
    return all(list(axes) == sorted(axes) for axes in layout.dims)


def test_placements_are_those_of_dtensor() -> None:
    assert dtensor_placements(Layout.parse("S0RP1", (4, 4), grid=(2, 2))) == (Shard(0), Partial())
