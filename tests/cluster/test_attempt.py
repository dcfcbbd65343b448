"""The worlds that one torchrun starts one after the other do not read each other's addresses."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed as dist

from colossal.cluster.attempt import enter_attempt
from colossal.errors import LaunchError


def form(store: dist.Store, world_size: int) -> list[dist.Store]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: enter_attempt(store, rank, world_size, 20.0), range(world_size)))


def test_all_ranks_of_an_attempt_share_a_part_that_no_other_attempt_has() -> None:
    store = dist.HashStore()
    first, second = form(store, 4), form(store, 4)
    first[0].set("address of 0", "dead")
    second[0].set("address of 1", "alive")
    assert all(part.get("address of 0") == b"dead" for part in first)
    assert not any(part.check(["address of 0"]) for part in second)
    assert all(part.get("address of 1") == b"alive" for part in second)


@pytest.mark.parametrize("died_after", ["greeting", "thanks"])
def test_a_process_that_died_while_it_joined_does_not_stand_for_the_next_one(died_after) -> None:
    store = dist.HashStore()
    halls = dist.PrefixStore("colossal/attempt", store)
    halls.set("greeting 1", "of a dead process")
    if died_after == "thanks":
        halls.add("number", 1)
        halls.set("of a dead process", "1")
        halls.set("thanks 1 1", "")
    parts = form(store, 2)
    parts[0].set("address", "alive")
    assert parts[1].get("address") == b"alive"


def test_an_attempt_may_lack_a_rank_that_an_earlier_one_had() -> None:
    store = dist.HashStore()
    form(store, 3)
    parts = form(store, 2)  # a node has gone for good
    parts[1].set("address", "alive")
    assert parts[0].get("address") == b"alive"


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(LaunchError, match=r"within 0.1 s. Found no rank \[1, 2\]"):
        enter_attempt(dist.HashStore(), 0, 3, 0.1)


def test_a_world_of_one_waits_for_nobody() -> None:
    part = enter_attempt(dist.HashStore(), 0, 1, 0.0)
    part.set("key", "value")
    assert part.get("key") == b"value"
