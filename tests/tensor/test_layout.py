import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import SIZES, layouts

from colossal._src.tensor import Region
from colossal.cluster import ParallelMesh
from colossal.errors import MeshError, PlanError, ShapeError
from colossal.tensor import Layout, shard, unshard
from colossal.testing import fake_world


def chunk(tensor: torch.Tensor, size: int, dim: int, index: int) -> torch.Tensor:
    """What torch.chunk gives to an index, nothing where it makes fewer chunks."""
    chunks = tensor.chunk(size, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def by_torch(whole: torch.Tensor, layout: Layout, place: int) -> torch.Tensor:
    """The elements of a place of the grid, by cutting a tensor axis after axis, and each group by itself."""
    coordinates = [int(index) for index in torch.unravel_index(torch.tensor(place), layout.grid)]
    for dim, axes in enumerate(layout.dims):
        pieces = list(whole.split(layout.groups[dim], dim)) if axes else [whole]
        for axis in axes:
            pieces = [chunk(piece, layout.grid[axis], dim, coordinates[axis]) for piece in pieces]
        whole = torch.cat(pieces, dim)
    return whole


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


@given(layouts())
def test_regions_are_the_chunks_of_torch(layout: Layout) -> None:
    whole = numbers(layout.shape)
    for place, rank in enumerate(layout.ranks):
        region = layout.region(rank)
        assert whole[region.slices].flatten().tolist() == by_torch(whole, layout, place).flatten().tolist()
        assert region.shape == layout.local_shape(rank)


@given(layouts(is_packed=True))
def test_parts_are_the_chunks_of_torch(layout: Layout) -> None:
    whole = numbers(layout.shape)
    for place, rank in enumerate(layout.ranks):
        part = shard(whole, layout, rank)
        assert torch.equal(part, by_torch(whole, layout, place))
        assert tuple(part.shape) == layout.local_shape(rank)
        assert all(length <= most for length, most in zip(part.shape, layout.padded_shape, strict=True))
        assert sum(region.numel for region in layout.regions_of(rank)) == part.numel()
    assert layout.padded_shape == layout.local_shape(layout.ranks[0]), "the first has the most"


@given(layouts(is_packed=True, is_partial=True))
def test_unshard_after_shard_changes_nothing(layout: Layout) -> None:
    whole = numbers(layout.shape)
    parts = {rank: shard(whole, layout, rank) for rank in layout.ranks}
    assert torch.equal(unshard(parts, layout), whole)


@given(layouts(is_partial=True))
def test_summands_are_added_and_replicas_are_not(layout: Layout) -> None:
    parts = {}
    for rank, place in layout.coordinates.items():
        summand = sum((axis + 1) * place[axis] for axis in layout.partial)
        parts[rank] = shard(numbers(layout.shape), Layout(layout.shape, layout.ranks, layout.grid, layout.dims), rank)
        parts[rank] = parts[rank] + summand
    per_rank = [sum((a + 1) * place[a] for a in layout.partial) for place in layout.coordinates.values()]
    copies = math.prod(size for axis, size in enumerate(layout.grid) if axis not in layout.partial)
    count = math.prod(layout.grid) // copies
    expected = count * numbers(layout.shape) + sum(per_rank) // copies
    assert torch.equal(unshard(parts, layout), expected)


@given(layouts(is_partial=True))
def test_is_read_as_it_is_written(layout: Layout) -> None:
    again = Layout.parse(str(layout), layout.shape, layout.grid)
    assert (again.dims, again.partial) == (layout.dims, layout.partial)


@given(layouts(is_packed=True))
def test_holders_cover_each_element_once_and_name_all_that_have_it(layout: Layout) -> None:
    count = torch.zeros(layout.shape, dtype=torch.long)
    for region, holders in layout.holders.items():
        count[region.slices] += 1
        assert holders == tuple(rank for rank in layout.ranks if region in layout.regions_of(rank))
    assert (count == 1).all()


@given(st.data(), SIZES)
def test_overlap_is_what_two_regions_share(data: st.DataObject, shape: tuple[int, ...]) -> None:
    regions = []
    for _ in range(2):
        start = tuple(data.draw(st.integers(0, size)) for size in shape)
        lengths = tuple(data.draw(st.integers(0, size - at)) for at, size in zip(start, shape, strict=True))
        regions.append(Region(start, lengths))
    first, second = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    first[regions[0].slices] = True
    second[regions[1].slices] = True
    common = regions[0].overlap(regions[1])
    assert common.numel == (first & second).sum()
    if common.numel:
        inside = numbers(shape)[regions[0].slices][common.inside(regions[0]).slices]
        assert torch.equal(inside, numbers(shape)[common.slices])


def test_is_written_as_the_tutorials_write_it() -> None:
    assert str(Layout((4, 4), ranks=(0, 1), dims=((0,), ()))) == "S0R"
    assert str(Layout((4, 4), grid=(2, 2), dims=((), (0, 1)))) == "RS01"
    assert str(Layout((4, 4), grid=(2, 2), dims=((), (1, 0)))) == "RS10"
    assert str(Layout((4, 4), ranks=(0, 1))) == "RR"
    assert str(Layout((4, 4), grid=(2, 2), dims=((1,), ()), partial=(0,))) == "S1RP0"


def test_the_order_of_the_axes_is_the_order_of_the_cuts() -> None:
    assert [Layout.parse("S01", (8,), grid=(2, 2)).region(rank).start for rank in range(4)] == [(0,), (2,), (4,), (6,)]
    assert [Layout.parse("S10", (8,), grid=(2, 2)).region(rank).start for rank in range(4)] == [(0,), (4,), (2,), (6,)]


def test_a_packed_weight_is_cut_piece_by_piece() -> None:
    layout = Layout.parse("S0R", (8, 3), grid=(2,), groups=[(4, 2, 2), (3,)])
    assert layout.local_shape(1) == (4, 3)
    assert layout.regions_of(1) == (Region((2, 0), (2, 3)), Region((5, 0), (1, 3)), Region((7, 0), (1, 3)))
    with pytest.raises(PlanError, match=r"Found 3 on rank 1.*regions_of"):
        layout.region(1)


def test_ranks_come_from_a_mesh() -> None:
    with fake_world(12, rank=7):
        mesh = ParallelMesh(dp=2, sp=2, tp=3)
        layout = Layout.parse("S0S1", (6, 4), mesh=mesh, axes=["tp", "dp"])
        assert (layout.ranks, layout.grid) == ((0, 6, 1, 7, 2, 8), (3, 2))
        assert layout.region(mesh.global_rank) == Region((2, 2), (2, 2))
        with pytest.raises(MeshError, match="without the other"):
            Layout.parse("S0", (6,), mesh=mesh)
        with pytest.raises(MeshError, match="each named once"):
            Layout.parse("S0", (6,), mesh=mesh, axes=["tp", "tp"])


@pytest.mark.parametrize(
    ("needed", "wrong"),
    [
        ("a rank for each place", {"grid": (2, 2)}),
        ("a rank for each place", {"ranks": (0, 0, 1)}),
        ("each of them once", {"dims": ((1,), ())}),
        ("each of them once", {"dims": ((0,), (0,))}),
        ("each of them once", {"dims": ((0,), ()), "partial": (0,)}),
        ("axes for each dimension", {"dims": ((0,),)}),
        ("groups whose lengths", {"groups": ((2, 1), (4,))}),
        ("a name for each axis", {"axes": ("dp", "tp")}),
    ],
)
def test_contradictions_are_refused(needed: str, wrong: dict[str, tuple]) -> None:
    with pytest.raises(PlanError, match=f"{needed}.*Found 3 ranks"):
        Layout(**{"shape": (4, 4), "ranks": (0, 1, 2)} | wrong)


@pytest.mark.parametrize("text", ["", "S", "X0R", "S0RQ", "P0R", "s0r", "S0", "S0RR"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"R or S and axes for each dimension.*shape \(4, 4\)"):
        Layout.parse(text, (4, 4), grid=(2,))


def test_a_rank_that_holds_nothing_of_it_is_refused() -> None:
    with pytest.raises(PlanError, match="Found rank 7"):
        Layout((4,), ranks=(0, 1)).region(7)


def test_parts_of_other_shapes_are_refused() -> None:
    layout = Layout.parse("S0R", (4, 4), grid=(2,))
    with pytest.raises(ShapeError, match=r"\(4, 4\).*Found \(4, 3\)"):
        shard(torch.zeros(4, 3), layout, 0)
    with pytest.raises(ShapeError, match=r"The part of rank 0.*\(2, 4\).*Found \(4, 4\)"):
        unshard({0: torch.zeros(4, 4)}, layout)
    with pytest.raises(ShapeError, match=r"none for the ranks \[1\]"):
        unshard({0: torch.zeros(2, 4)}, layout)
