import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossal.errors import PlanError
from colossal.tensor import Layout, Region

SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout on up to 12 ranks, whose numbers are not their places."""
    shape = draw(SIZES)
    grid = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    cuts = tuple(draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in grid)
    ranks = draw(st.permutations(range(math.prod(grid))))
    return Layout(shape, tuple(10 * rank for rank in ranks), grid, cuts)


def chunk(tensor: torch.Tensor, size: int, dim: int, index: int) -> torch.Tensor:
    """What torch.chunk gives to an index, nothing where it makes fewer chunks."""
    chunks = tensor.chunk(size, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def by_torch(layout: Layout, place: int) -> torch.Tensor:
    """The elements of a place of the grid, by cutting a tensor axis after axis."""
    part = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    coordinates = torch.unravel_index(torch.tensor(place), layout.grid)
    for size, cut, index in zip(layout.grid, layout.cuts, coordinates, strict=True):
        part = part if cut is None else chunk(part, size, cut, int(index))
    return part


@given(layouts())
def test_regions_are_the_chunks_of_torch(layout: Layout) -> None:
    whole = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    for place, rank in enumerate(layout.ranks):
        region = layout.region(rank)
        assert whole[region.slices].flatten().tolist() == by_torch(layout, place).flatten().tolist()
        assert region.numel == by_torch(layout, place).numel()


@given(layouts())
def test_holders_cover_each_element_once_and_name_all_that_have_it(layout: Layout) -> None:
    count = torch.zeros(layout.shape, dtype=torch.long)
    for region, holders in layout.holders.items():
        count[region.slices] += 1
        assert holders == tuple(rank for rank in layout.ranks if layout.region(rank) == region)
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
        inside = torch.arange(math.prod(shape)).reshape(shape)[regions[0].slices][common.inside(regions[0]).slices]
        assert torch.equal(inside, torch.arange(math.prod(shape)).reshape(shape)[common.slices])


def test_is_written_as_the_tutorials_write_it() -> None:
    assert str(Layout((4, 4), ranks=(0, 1), cuts=(0,))) == "S0R"
    assert str(Layout((4, 4), ranks=(0, 1, 2, 3), grid=(2, 2), cuts=(1, 1))) == "RS01"
    assert str(Layout((4, 4), ranks=(0, 1))) == "RR"


@pytest.mark.parametrize(
    ("grid", "cuts"), [((2, 2), (None, None)), ((3,), (2,)), ((3,), (-1,)), ((3,), (0, 1))], ids=str
)
def test_contradictions_are_refused(grid: tuple[int, ...], cuts: tuple[int | None, ...]) -> None:
    with pytest.raises(PlanError, match=r"Found 3 ranks.*Make the product"):
        Layout((4, 4), ranks=(0, 1, 2), grid=grid, cuts=cuts)


def test_a_rank_that_holds_nothing_of_it_is_refused() -> None:
    with pytest.raises(PlanError, match="Found rank 7"):
        Layout((4,), ranks=(0, 1)).region(7)
