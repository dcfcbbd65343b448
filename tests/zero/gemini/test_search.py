# pyright: reportArgumentType=false
"""The search agrees with packing for every size, and packing is what it says it is."""

import statistics
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn

from colossal._src.zero.gemini.chunk_search import (
    ChunkUsage,
    allocated_numel,
    ordered_parameters,
    pack_parameters,
    search_chunk_configuration,
    unshared_parameters,
)
from colossal.errors import ConfigError
from colossal.logging import get_dist_logger
from colossal.testing import fake_world, run_threads

MEBI = 1 << 20
DTYPES = (torch.float32, torch.bfloat16)


def parameter(numel: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"), requires_grad=requires_grad)


def parameters_of(*numels: int) -> list[nn.Parameter]:
    return [parameter(numel) for numel in numels]


def model_of(parameters: Sequence[nn.Parameter], tied: Sequence[int] = ()) -> nn.Module:
    """A model with these parameters, of which some have a second name."""
    model = nn.Module()
    for index, each in enumerate(parameters):
        model.register_parameter(f"p{index}", each)
    again = nn.Module()
    for index in tied:
        again.register_parameter(f"p{index}", parameters[index])
    model.add_module("again", again)
    return model


def numels_of(runs: Sequence[Sequence[nn.Parameter]]) -> list[list[int]]:
    return [[each.numel() for each in run] for run in runs]


def waste_by_packing(
    parameters: Sequence[nn.Parameter], size: int, dp_size: int, alone: Collection[nn.Parameter] = ()
) -> int:
    """The waste of what `pack_parameters` does, without the help of `allocated_numel`."""
    wasted = 0
    for run in pack_parameters(parameters, size, separate=set(alone)):
        numel = sum(each.numel() for each in run)
        owned = numel > size or any(each is other for each in run for other in alone)
        wasted += -numel % dp_size if owned else size - numel
    return wasted


def usual(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those that are at most three standard deviations above the mean."""
    numels = [each.numel() for each in parameters]
    bound = statistics.fmean(numels) + 3 * statistics.pstdev(numels)
    return [each for each, numel in zip(parameters, numels, strict=True) if numel <= bound]


def search_in_elements(model: nn.Module, first: int, last: int, interval: int, **kwargs: Any) -> tuple[int, int, int]:
    """Search between numbers of elements, and return the size, the total and the waste."""
    found, total, wasted = search_chunk_configuration(model, (last - first) / MEBI, interval, first / MEBI, **kwargs)
    [configuration] = found.values()
    return configuration["chunk_size"], total, wasted


# ------------------------------------------------------------------------------------------ packing


def test_what_does_not_fit_begins_the_next_chunk() -> None:
    assert numels_of(pack_parameters(parameters_of(6, 4, 5, 6, 1), 10)) == [[6, 4], [5], [6, 1]]


def test_what_came_before_a_closed_chunk_is_never_filled_up() -> None:
    assert numels_of(pack_parameters(parameters_of(6, 9, 1, 4), 10)) == [[6], [9, 1], [4]]


def test_a_longer_parameter_gets_a_chunk_and_leaves_the_open_one_open() -> None:
    assert numels_of(pack_parameters(parameters_of(3, 11, 4, 10), 10)) == [[3, 4], [11], [10]]


def test_each_kind_has_its_own_open_chunk() -> None:
    parameters = [
        parameter(3),
        parameter(4, torch.bfloat16),
        parameter(5, requires_grad=False),
        nn.Parameter(torch.empty(6)),
        *(parameter(3), parameter(4, torch.bfloat16), parameter(5, requires_grad=False)),
        nn.Parameter(torch.empty(2)),
    ]
    assert numels_of(pack_parameters(parameters, 10)) == [[3, 3], [4, 4], [5, 5], [6, 2]]


def test_a_parameter_that_comes_again_counts_once() -> None:
    first, second = parameters_of(3, 4)
    assert numels_of(pack_parameters([first, second, first], 10)) == [[3, 4]]


@pytest.mark.parametrize("container", [set, frozenset, list, tuple, dict.fromkeys])
def test_whoever_is_to_be_alone_is_alone(container) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    runs = pack_parameters(parameters, 10, separate=container(parameters[1:3]))
    assert [[id(each) for each in run] for run in runs] == [
        [id(parameters[0]), id(parameters[3])],
        [id(parameters[1])],
        [id(parameters[2])],
    ]


def test_anything_that_knows_its_members_can_say_who_is_alone() -> None:
    class Short:
        def __contains__(self, each: object) -> bool:
            return isinstance(each, nn.Parameter) and each.numel() < 3

    assert numels_of(pack_parameters(parameters_of(5, 2, 3), 10, separate=Short())) == [[5, 3], [2]]


def test_nothing_packs_into_nothing() -> None:
    assert pack_parameters([], 10) == []


def test_an_empty_parameter_is_in_a_chunk() -> None:
    assert numels_of(pack_parameters(parameters_of(0, 10, 0, 1), 10)) == [[0, 10, 0], [1]]


@pytest.mark.parametrize("chunk_numel", [0, -3])
def test_a_chunk_has_room(chunk_numel: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk_numel={chunk_numel}"):
        pack_parameters(parameters_of(1), chunk_numel)


def test_only_a_chunk_of_its_own_is_as_long_as_its_parameter() -> None:
    short, exact, long = parameters_of(5, 8, 9)
    assert [allocated_numel(run, 8, 4) for run in ([short], [exact], [long])] == [8, 8, 12]
    assert allocated_numel([short], 16, 4, separate=[exact, short]) == 8
    assert allocated_numel([short, exact], 16, 4, separate={long}) == 16


# ------------------------------------------------------------------------------------------ the search


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A model of several kinds, some of it tied or to be alone, with a range to search."""
    large = st.integers(200, 4000) if draw(st.booleans()) else st.integers(0, 40)
    count = draw(st.integers(1, 30))
    numels = [draw(large if draw(st.integers(0, 9)) == 0 else st.integers(0, 40)) for _ in range(count)]
    few = st.sets(st.integers(0, count - 1), max_size=3)
    parameters = [parameter(numel, draw(st.sampled_from(DTYPES)), draw(st.booleans())) for numel in numels]
    return {
        "parameters": parameters,
        "tied": sorted(draw(few)),
        "alone": {parameters[index] for index in draw(few)},
        "order": draw(st.permutations(parameters)),
        "first": draw(st.integers(1, 120)),
        "span": draw(st.integers(0, 150)),
        "interval": draw(st.integers(1, 20)),
        "dp_size": draw(st.integers(1, 7)),
        "filter_exlarge_params": draw(st.booleans()),
    }


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_no_size_wastes_less_and_no_smaller_one_as_little(case: dict[str, Any]) -> None:
    parameters, order, dp_size = case["parameters"], case["order"], case["dp_size"]
    first, last = case["first"], case["first"] + case["span"]
    tied = [parameters[index] for index in case["tied"]]

    def alone_at(size: int) -> set[nn.Parameter]:
        return case["alone"] | {each for each in tied if each.numel() > size / 4}

    with fake_world(dp_size):
        size, total, wasted = search_in_elements(
            model_of(parameters, case["tied"]),
            first,
            last,
            case["interval"],
            memstas=SimpleNamespace(param_order=order),
            separate=case["alone"],
            filter_exlarge_params=case["filter_exlarge_params"],
        )
    assert total == sum(each.numel() for each in parameters)
    assert wasted == waste_by_packing(order, size, dp_size, alone_at(size))
    if total < first:
        expected = max(total, 1)
        assert size == expected + -expected % (16 * dp_size)
        return
    searched = usual(order) if case["filter_exlarge_params"] else order
    least = max(first, *(each.numel() for each in searched if each not in case["alone"]), 1)
    sizes = [each + -each % dp_size for each in range(least, least + last - first + 1, case["interval"])]
    assert size == min(sizes, key=lambda each: waste_by_packing(searched, each, dp_size, alone_at(each)))


def test_the_largest_size_is_tried() -> None:
    model = model_of(parameters_of(*[8] * 4))
    assert search_in_elements(model, 10, 16, 6) == (16, 32, 0)
    assert search_in_elements(model, 10, 15, 6) == (10, 32, 8)
    assert search_in_elements(model, 10, 17, 6) == (16, 32, 0)


def test_of_sizes_that_waste_the_same_the_smallest_is_taken() -> None:
    model = model_of(parameters_of(*[4] * 8))
    assert search_in_elements(model, 5, 40, 1) == (8, 32, 0)


def test_many_sizes_are_tried_in_several_goes() -> None:
    """The best one is far behind, and an equal one comes later still."""
    model = model_of(parameters_of(*[100_000] * 3, 50_000))
    size, _, wasted = search_in_elements(model, 101_000, 360_000, 1)
    assert (size, wasted) == (350_000, 0)
    halves = model_of(parameters_of(*[50_000] * 6))
    assert search_in_elements(halves, 50_001, 300_000, 1)[0] == 100_000


def test_every_size_is_a_multiple_of_the_ranks() -> None:
    with fake_world(7):
        configuration, total, wasted = search_chunk_configuration(model_of(parameters_of(*[50] * 4)), 0, 1, 100 / MEBI)
    assert configuration == {7: {"chunk_size": 105, "keep_gathered": False}}
    assert (total, wasted) == (200, 10)


def test_a_small_model_is_one_chunk_of_which_each_rank_has_a_multiple_of_16() -> None:
    with fake_world(3):
        configuration, total, wasted = search_chunk_configuration(nn.Linear(9, 10), 32, 1024)
    assert configuration == {3: {"chunk_size": 144, "keep_gathered": False}}
    assert (total, wasted) == (100, 44)


def test_a_model_as_large_as_the_smallest_size_is_searched_for() -> None:
    with fake_world(3):
        assert search_in_elements(nn.Linear(9, 10), 100, 100, 1) == (102, 100, 2)
        assert search_in_elements(nn.Linear(9, 10), 101, 101, 1) == (144, 100, 44)


def test_a_model_of_empty_parameters_gets_a_chunk() -> None:
    assert search_in_elements(model_of(parameters_of(0)), 10, 20, 1) == (16, 0, 16)


def test_exceptionally_long_parameters_have_no_say_but_count() -> None:
    """A size that suits the long one would waste less; it is filled with it all the same where it fits."""
    model = model_of(parameters_of(*[30] * 15, 100))
    assert search_in_elements(model, 60, 190, 10) == (90, 550, 0)
    without = search_in_elements(model, 120, 190, 10)
    assert without == (150, 550, 50), "150 is best for the fifteen alone"
    with_it = search_in_elements(model, 120, 190, 10, filter_exlarge_params=False)
    assert with_it[2] <= without[2]
    assert with_it[0] != without[0]


def test_less_than_three_deviations_are_not_exceptional() -> None:
    """A hundred among seven times thirty is 2.6 deviations above the mean; without it 120 would be the best size."""
    parameters = parameters_of(*[30] * 7, 100)
    assert search_in_elements(model_of(parameters), 120, 190, 10) == (160, 310, 10)
    assert search_in_elements(model_of(parameters[:-1]), 120, 190, 10)[0] == 120


def test_exceptionally_short_parameters_have_a_say() -> None:
    assert search_in_elements(model_of(parameters_of(*[100] * 15, 1)), 100, 101, 1) == (101, 1501, 14)


def test_what_fills_up_the_ranks_of_a_long_parameter_is_wasted_too() -> None:
    with fake_world(4):
        assert search_in_elements(model_of(parameters_of(9, *[1] * 20)), 4, 4, 1) == (4, 29, 3)


def test_a_tied_parameter_is_alone_where_it_is_longer_than_a_quarter_of_the_chunk() -> None:
    model = model_of(parameters_of(25, 75), tied=[0])
    assert search_in_elements(model, 100, 100, 1) == (100, 100, 0)
    assert search_in_elements(model, 99, 99, 1) == (99, 100, 24)
    assert unshared_parameters(model, 100) == set()
    assert unshared_parameters(model, 99) == {model.p0}


def test_a_module_at_two_places_is_tied() -> None:
    layer = nn.Linear(3, 3)
    assert unshared_parameters(nn.Sequential(layer, nn.ReLU(), layer), 10) == {layer.weight, layer.bias}
    assert unshared_parameters(nn.Sequential(layer, nn.Linear(3, 3)), 10) == set()


def test_gathered_chunks_waste_nothing() -> None:
    model = model_of(parameters_of(*[30] * 5))
    with fake_world(4):
        configuration, total, wasted = search_chunk_configuration(model, 1, 1, 50 / MEBI, strict_ddp_flag=True)
    assert configuration == {4: {"chunk_size": 52, "keep_gathered": True}}
    assert (total, wasted) == (150, 0)


def test_the_order_of_use_decides() -> None:
    parameters = parameters_of(6, 6, 4, 4)
    model = model_of(parameters)
    order = SimpleNamespace(param_order=[parameters[index] for index in (0, 2, 1, 3)])
    assert search_in_elements(model, 10, 10, 1) == (10, 20, 10)
    assert search_in_elements(model, 10, 10, 1, memstas=order) == (10, 20, 0)


def test_parameters_of_which_the_order_knows_nothing_come_last() -> None:
    parameters = parameters_of(1, 2, 3, 4)
    order = SimpleNamespace(param_order=[parameters[2], parameters[0], parameters[2]])
    assert [each.numel() for each in ordered_parameters(model_of(parameters, [3]), order)] == [3, 1, 2, 4]


def test_the_order_is_one_of_the_same_model() -> None:
    order = SimpleNamespace(param_order=[*nn.Linear(2, 3).parameters()])
    with pytest.raises(ConfigError, match=r"Found 2 others, the first of shape \(3, 2\)"):
        search_chunk_configuration(nn.Linear(2, 3), 32, 1024, memstas=order)


@pytest.mark.parametrize("value", [-1, -0.001, float("nan"), float("inf")])
def test_the_range_is_not_negative(value: float) -> None:
    with pytest.raises(ConfigError, match="search_range_m"):
        search_chunk_configuration(nn.Linear(2, 3), value, 1024)


@pytest.mark.parametrize("value", [0, -1, 0.5, True, 1024.0])
def test_the_interval_is_a_number_of_elements(value: Any) -> None:
    with pytest.raises(ConfigError, match="search_interval"):
        search_chunk_configuration(nn.Linear(2, 3), 32, value)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_the_smallest_size_is_not_negative(value: float) -> None:
    with pytest.raises(ConfigError, match="min_chunk_size_m"):
        search_chunk_configuration(nn.Linear(2, 3), 32, 1024, value)


@pytest.mark.parametrize("smallest", [0, 0.1, 5])
def test_no_chunk_is_smaller_than_the_largest_parameter(smallest: float) -> None:
    assert search_in_elements(nn.Linear(2, 3), smallest, smallest, 1) == (6, 9, 3)
    model = nn.Sequential(*(nn.Linear(5, 7) for _ in range(4)))
    size, *_ = search_in_elements(model, smallest, smallest + 20, 1)
    assert size >= 35
    runs = pack_parameters(model.parameters(), size)
    assert len(runs) <= 4, "each weight shares its chunk with biases"


def test_a_parameter_far_above_the_others_does_not_set_the_size() -> None:
    model = model_of(parameters_of(1000, *[8] * 30))
    assert search_in_elements(model, 0, 0, 1) == (8, 1240, 0)
    assert search_in_elements(model, 0, 0, 1, filter_exlarge_params=False)[0] == 1000


def test_there_are_parameters() -> None:
    with pytest.raises(ConfigError, match="Found none in ReLU"):
        search_chunk_configuration(nn.ReLU(), 32, 1024)


# ------------------------------------------------------------------------------------------ ranks and messages


def test_ranks_find_the_same_for_their_group() -> None:
    """Ranks 0 and 2 share the parameters, and so do 1 and 3."""
    model = nn.Sequential(*(nn.Linear(9, 7) for _ in range(3)))

    def program() -> Any:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[dist.get_rank() % 2]
        other = groups[1 - dist.get_rank() % 2]
        with pytest.raises(ConfigError, match="not in process_group"):
            search_chunk_configuration(model, 0, 1, 71 / MEBI, process_group=other)
        return search_chunk_configuration(model, 0, 1, 71 / MEBI, process_group=group)

    results = run_threads(program, 4)
    assert results == [({2: {"chunk_size": 72, "keep_gathered": False}}, 210, 6)] * 4


def test_parameters_stay_where_they_are() -> None:
    model = nn.Linear(4, 4)
    before = [(each.data_ptr(), each.detach().clone()) for each in model.parameters()]
    search_in_elements(model, 5, 10, 1)
    for (pointer, values), each in zip(before, model.parameters(), strict=True):
        assert each.data_ptr() == pointer
        assert torch.equal(each, values)


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False)])
def test_rank_0_says_what_is_wasted_if_asked(rank: int, speaks: bool, tmp_path) -> None:
    logger, model = get_dist_logger(), model_of(parameters_of(*[MEBI] * 3))
    path = logger.log_to_file(tmp_path)
    try:
        with fake_world(2, rank=rank):
            search_chunk_configuration(model, 0, 1, 2)
            assert not path.read_text()
            search_chunk_configuration(model, 0, 1, 2, verbose=True)
    finally:
        logger.close()
    said = "Chunks of 2,097,152 elements: parameters fill 3.00 Mi elements, 1.00 Mi stay empty (25.00 % of all)."
    assert (said in path.read_text()) == speaks


def test_nothing_wasted_of_nothing() -> None:
    assert ChunkUsage(16, 0, 0).wasted_percentage == 0.0
