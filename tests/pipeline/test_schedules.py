# pyright: reportArgumentType=false
"""Schedules: every pass once, in an order that comes to an end, with the bubble and the memory that they promise."""

import json
from itertools import product

import pytest

from colossal.errors import ConfigError
from colossal.pipeline import (
    SCHEDULES,
    Action,
    Costs,
    PipelineOrder,
    StagePlacement,
    Timeline,
    bubble_fraction,
    forward_only,
    interleaved,
    one_forward_one_backward,
    simulate,
    zero_bubble_v,
)

SIZES = [(2, 2), (2, 8), (3, 6), (4, 4), (4, 12), (8, 16)]


def place(style: str, size: int) -> StagePlacement:
    return StagePlacement(size, 1 if style == "1f1b" else 2, is_v=style == "zbv")


def bubble(orders: PipelineOrder, placement: StagePlacement, costs: Costs | None = None) -> float:
    return bubble_fraction(simulate(orders, placement, costs))


@pytest.mark.parametrize(("style", "sizes"), list(product(SCHEDULES, SIZES)))
def test_every_pass_is_made_once_by_the_rank_of_its_stage(style, sizes) -> None:
    size, number = sizes
    placement = place(style, size)
    orders = SCHEDULES[style](placement, number)
    kinds = ("F", "I", "W") if style == "zbv" else ("F", "B")
    expected = {Action(*each) for each in product(kinds, range(placement.num_stages), range(number))}
    assert sorted(action for order in orders for action in order) == sorted(expected)
    assert all(placement.rank_of(action.stage) == rank for rank, order in enumerate(orders) for action in order)
    assert len(simulate(orders, placement)) == len(expected)


@pytest.mark.parametrize(("size", "number"), SIZES)
def test_the_bubble_is_that_of_the_formula(size, number) -> None:
    one, two, v = StagePlacement(size), StagePlacement(size, 2), StagePlacement(size, 2, is_v=True)
    assert bubble(one_forward_one_backward(one, number), one) == pytest.approx((size - 1) / (number + size - 1))
    assert bubble(interleaved(two, number), two) == pytest.approx((size - 1) / (2 * number + size - 1))
    assert bubble(zero_bubble_v(v, number), v) == pytest.approx((size - 1) / (6 * number + size - 1))
    assert bubble(forward_only(one, number), one) == pytest.approx((size - 1) / (number + size - 1))


@pytest.mark.parametrize(("size", "number"), SIZES)
def test_no_rank_holds_more_than_a_micro_batch_for_each_rank(size, number) -> None:
    for style, ends in (("1f1b", "B"), ("zbv", "W")):
        placement = place(style, size)
        for rank, order in enumerate(SCHEDULES[style](placement, number)):
            held = [sum((a.kind == "F") - (a.kind == ends) for a in order[: end + 1]) for end in range(len(order))]
            assert max(held) <= placement.num_chunks * (size - rank if style == "1f1b" else size)


@pytest.mark.parametrize(("size", "number"), SIZES)
def test_messages_of_an_interleaved_schedule_travel_while_ranks_work(size, number) -> None:
    """Only the way of the first micro-batch to the last stage, and of the last one back, is waited for."""
    placement, costs = StagePlacement(size, 2), Costs(transfer=0.5)
    duration = max(each.end for each in simulate(interleaved(placement, number), placement, costs))
    assert duration == 2 * 3 * number + 3 * (size - 1) + 2 * (2 * size - 1) * 0.5


@pytest.mark.parametrize(("size", "number"), SIZES)
def test_a_rank_of_a_v_lets_nobody_wait_who_could_go_backward(size, number) -> None:
    """Whenever it begins another pass, no gradient of an input could be computed instead."""
    placement, costs = StagePlacement(size, 2, is_v=True), Costs(forward=1.0, inputs=1.5, weights=0.75, transfer=0.25)
    orders = zero_bubble_v(placement, number, costs)
    times = {each.action: each for each in simulate(orders, placement, costs)}

    def ready_at(action: Action, rank: int) -> float:
        needed = action.needs(placement.num_stages)
        assert needed is not None
        return times[needed].end + (costs.transfer if placement.rank_of(needed.stage) != rank else 0.0)

    for rank, order in enumerate(orders):
        for place, action in enumerate(order):
            waiting = [each for each in order[place + 1 :] if each.kind == "I"] if action.kind != "I" else []
            assert all(ready_at(each, rank) > times[action].begin for each in waiting), (rank, action)


def test_a_v_that_knows_its_costs_waits_less() -> None:
    placement, costs = StagePlacement(4, 2, is_v=True), Costs(forward=1.0, inputs=1.4, weights=0.7, transfer=0.2)
    known, unknown = zero_bubble_v(placement, 12, costs), zero_bubble_v(placement, 12)
    assert bubble(known, placement, costs) < bubble(unknown, placement, costs)


def test_micro_batches_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"Found 3 micro-batches on 2 ranks\. Use a multiple of 2"):
        interleaved(StagePlacement(2, 2), 3)
    placement = StagePlacement(3, 2, is_v=True)
    assert bubble(zero_bubble_v(placement, 4), placement) < 0.25
    with pytest.raises(ConfigError, match="Found 2 chunks of the model"):
        one_forward_one_backward(StagePlacement(2, 2), 4)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    placement = StagePlacement(2)
    first, second = one_forward_one_backward(placement, 1)
    with pytest.raises(ConfigError, match=r"Found that \[B0\.0, F1\.0\] wait for each other"):
        simulate((first[::-1], second), placement)


def test_a_timeline_is_a_picture_and_a_trace(tmp_path) -> None:
    placement = StagePlacement(2, 2, is_v=True)
    timeline = Timeline(tuple(simulate(zero_bubble_v(placement, 2), placement)))
    timeline.save([tmp_path / "step.svg", tmp_path / "step.json"])
    picture = (tmp_path / "step.svg").read_text()
    assert picture.count("<title>") == 24
    assert picture.count(">rank ") == 2
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert len(events) == 24
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(timeline.duration * 1e6)
