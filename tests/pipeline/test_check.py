# pyright: reportArgumentType=false
"""Schedules as data: all of ours end on any backend, and planted faults are found."""

from itertools import product
from typing import Any

import pytest

from colossal._src.pipeline import P2PMessage, SharedParameter, check_schedule
from colossal._src.pipeline.schedule.p2p_messages import P2POperation, P2PPrograms, p2p_programs
from colossal._src.pipeline.schedule.verification import check_programs
from colossal.errors import ConfigError
from colossal.pipeline import (
    SCHEDULES,
    Action,
    PipelineOrder,
    StagePlacement,
    forward_only,
    one_forward_one_backward,
    zero_bubble_v,
)

RANKS = range(2, 9)
CHUNKS = {"1f1b": (1,), "interleaved": (1, 2, 3), "zbv": (1, 2, 3)}
TWO = StagePlacement(2)


def numbers_for(style: str, size: int) -> list[int]:
    """Micro-batches: fewer than ranks, as many, and more; in groups where the schedule needs them."""
    return [size, 2 * size, 3 * size] if style == "interleaved" else [1, 2, size, size + 1, 2 * size + 3]


def shared_among(placement: StagePlacement) -> list[SharedParameter]:
    """Tied first and last stages, a parameter of all stages, and two that cross."""
    last = placement.num_stages - 1
    found = [(0, last), tuple(range(last + 1)), (0, last // 2), (min(1, last), last)]
    return [SharedParameter(tuple(f"{place}.{stage}" for stage in each), each) for place, each in enumerate(found)]


def cases() -> list[Any]:
    return [
        pytest.param(style, size, marks=pytest.mark.slow if size > 4 else ()) for style in SCHEDULES for size in RANKS
    ]


@pytest.mark.parametrize(("style", "size"), cases())
def test_every_schedule_ends_even_if_each_send_waits_for_its_receive(style, size) -> None:
    for chunks, number in product(CHUNKS[style], numbers_for(style, size)):
        placement = StagePlacement(size, chunks, is_v=style == "zbv")
        shared = shared_among(placement)
        check_schedule(SCHEDULES[style](placement, number), placement, shared)
        check_schedule(forward_only(placement, number), placement, shared)


def programs(number: int = 3) -> list[list[P2POperation]]:
    return [list(each) for each in p2p_programs(one_forward_one_backward(TWO, number), TWO)]


def check(changed: list[list[P2POperation]]) -> None:
    check_programs(tuple(map(tuple, changed)))


def test_what_is_not_changed_is_no_fault() -> None:
    check(programs())


def test_two_messages_that_are_swapped_where_they_are_sent() -> None:
    changed = programs()
    first, second, *_ = (place for place, each in enumerate(changed[0]) if each.kind == "send")
    changed[0][first], changed[0][second] = changed[0][second], changed[0][first]
    with pytest.raises(
        ConfigError,
        match="message 0 from rank 0 to rank 1 is the hidden states of micro-batch 1 after stage 0 where it is sent, "
        "and the hidden states of micro-batch 0 after stage 0 where it is received",
    ):
        check(changed)


@pytest.mark.parametrize("kind", ["post", "send"])
def test_a_message_without_its_other_side(kind) -> None:
    changed = programs()
    source, target = (0, 1) if kind == "send" else (1, 0)
    changed[0].remove(P2POperation(kind, 1, P2PMessage(kind == "post", 0, 2)))
    with pytest.raises(ConfigError, match=rf"message 2 from rank {source} to rank {target} is .*nothing where it is"):
        check(changed)


def test_a_wait_for_what_was_not_posted_yet() -> None:
    changed = programs(1)
    post, wait = (
        next(place for place, each in enumerate(changed[1]) if each.kind == kind) for kind in ("post", "wait")
    )
    changed[1][post], changed[1][wait] = changed[1][wait], changed[1][post]
    with pytest.raises(ConfigError, match="Found that rank 0 sends the hidden states of micro-batch 0 .* to rank 1; "):
        check(changed)


def test_a_cycle_of_sends_that_wait_for_their_receives() -> None:
    shared = SharedParameter(("wte.weight", "lm_head.weight"), (0, 1))
    changed = [list(each) for each in p2p_programs(one_forward_one_backward(TWO, 1), TWO, [shared])]
    for program in changed:
        place = program.index(next(each for each in program if each.kind == "send" and each.payload == shared))
        program.insert(place - 1, program.pop(place))  # ahead of the receive
    with pytest.raises(
        ConfigError,
        match="rank 0 sends the gradient of wte.weight to rank 1; rank 1 sends the gradient of wte.weight to rank 0",
    ):
        check(changed)


def test_a_cycle_of_four_ranks_is_reported_alone() -> None:
    """Ranks 1 to 3 wait for each other, and rank 0 for rank 1."""
    message = P2PMessage(False, 0, 0)
    pairs = [(0, 1), (1, 2), (2, 3), (3, 1)]
    changed: P2PPrograms = tuple(
        (
            P2POperation("send", target, message),
            *(P2POperation("post", other, message) for other, here in pairs if here == source),
        )
        for source, target in pairs
    )
    with pytest.raises(
        ConfigError, match=r"Found that rank 1 sends .* rank 2; rank 2 sends .*; rank 3 sends .* rank 1\."
    ):
        check_programs(changed)


def order(text: str) -> tuple[Action, ...]:
    return tuple(Action(each[0], int(each[1]), int(each[3:])) for each in text.split())


@pytest.mark.parametrize(
    ("orders", "found"),
    [
        (("B0.0 F0.0", "F1.0 B1.0"), "rank 0 makes B0.0 before F0.0"),
        (("F0.0 B0.0", "B1.0 F1.0"), "rank 1 makes B1.0 before F1.0"),
        (("F0.0 W0.0 I0.0", "F1.0 I1.0 W1.0"), "rank 0 makes W0.0 before I0.0"),
        (("F0.0 B0.0", "F1.0"), "Found B1.0 0 times"),
        (("F0.0 B0.0 F0.1", "F1.0 B1.0 F1.1 B1.1"), "Found B0.1 0 times"),
        (("F0.0 F0.0 B0.0", "F1.0 B1.0"), "Found F0.0 2 times"),
        (("F0.0 B0.0", "F1.0 B1.0 I1.0"), "Found I1.0 1 times"),
        (("F0.0 F1.0 B1.0 B0.0", ""), r"Found F1.0 among its passes"),
        (("F0.0 F9.0", "F1.0"), r"\[0\] on rank 0. Found F9.0 among its passes"),
        (("F0.0", "F1.0", "F2.0"), "Found 3 orders"),
        (
            ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"),
            "rank 0 waits for the gradients of micro-batch 0 .*; rank 1 waits for the hidden states of micro-batch 1 ",
        ),
    ],
)
def test_orders_that_do_not_work(orders, found) -> None:
    with pytest.raises(ConfigError, match=found):
        check_schedule(tuple(map(order, orders)), TWO)


def test_a_schedule_of_another_placement() -> None:
    v, round_ = StagePlacement(2, 2, is_v=True), StagePlacement(2, 2)
    orders: PipelineOrder = zero_bubble_v(v, 4)
    check_schedule(orders, v)
    with pytest.raises(ConfigError, match=r"are \[0, 2\] on rank 0\. Found F3\.0 among its passes"):
        check_schedule(orders, round_)


def test_schedules_are_not_replaced() -> None:
    with pytest.raises(TypeError):
        SCHEDULES["1f1b"] = zero_bubble_v
