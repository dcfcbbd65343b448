"""The worlds that one torchrun starts one after the other do not read each other's addresses."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed as dist

from colossal._src.cluster.process_spec import ProcessSpec
from colossal._src.cluster.rendezvous import agree_on_world
from colossal.errors import LaunchError

pytestmark = pytest.mark.slow


def member(rank: int, world_size: int) -> ProcessSpec:
    return ProcessSpec(rank, world_size, "node0", 29500, None)


def form(store: dist.Store, world_size: int) -> list[dist.Store]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: agree_on_world(store, member(rank, world_size), 20.0), range(world_size)))


def errors_of(sizes: list[int], lasting: bool = False) -> list[str]:
    """Let ranks come that were started with these world sizes; return what each is told."""
    store = dist.HashStore()

    def enter(rank: int) -> str:
        with pytest.raises(LaunchError) as error:
            agree_on_world(store, member(rank, sizes[rank]), 20.0, lasting=lasting)
        return str(error.value)

    greetings = [f"greetings {count}" for count in range(1, len(sizes))]
    with ThreadPoolExecutor(len(sizes)) as pool:
        others = [pool.submit(enter, rank) for rank in range(1, len(sizes))]
        while not dist.PrefixStore("colossal/attempt", store).check(greetings):
            time.sleep(0.01)
        return [enter(0), *(other.result() for other in others)]


def test_all_ranks_of_an_attempt_share_a_part_that_no_other_attempt_has() -> None:
    store = dist.HashStore()
    first, second = form(store, 4), form(store, 4)
    first[0].set("address of 0", "dead")
    second[0].set("address of 1", "alive")
    assert all(part.get("address of 0") == b"dead" for part in first)
    assert not any(part.check(["address of 0"]) for part in second)
    assert all(part.get("address of 1") == b"alive" for part in second)


@pytest.mark.parametrize("died_after", ["greeting", "reply"])
def test_a_process_that_died_while_it_joined_does_not_stand_for_the_next_one(died_after) -> None:
    store = dist.HashStore()
    halls = dist.PrefixStore("colossal/attempt", store)
    halls.add("greetings", 1)
    halls.set("greetings 1", "of a dead process")
    if died_after == "reply":
        halls.add("number", 1)
        halls.set("of a dead process", "1 2")
        halls.add("replies 1", 1)
        halls.set("replies 1 1", "1 2")
    parts = form(store, 2)
    parts[0].set("address", "alive")
    assert parts[1].get("address") == b"alive"


def test_an_attempt_may_lack_a_rank_that_an_earlier_one_had() -> None:
    store = dist.HashStore()
    form(store, 3)
    with ThreadPoolExecutor(2) as pool:  # a node has gone for good, and rank 1 is the first to come again
        other = pool.submit(agree_on_world, store, member(1, 2), 20.0, lasting=True)
        time.sleep(0.2)
        first = agree_on_world(store, member(0, 2), 20.0, lasting=True)
    other.result().set("address", "alive")
    assert first.get("address") == b"alive"


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(LaunchError, match=r"must come to node0:29500 within 0.1 s. Found no rank 1, 2\."):
        agree_on_world(dist.HashStore(), member(0, 3), 0.1)


def test_ranks_that_have_come_learn_which_one_has_not() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        others = [
            pool.submit(agree_on_world, store, member(rank, 3), seconds) for rank, seconds in ((0, 0.5), (1, 20.0))
        ]
    assert all("Found no rank 2." in str(other.exception()) for other in others)


def test_a_world_of_one_waits_for_nobody() -> None:
    part = agree_on_world(dist.HashStore(), member(0, 1), 0.0)
    part.set("key", "value")
    assert part.get("key") == b"value"


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([3, 2], "world_size=2 on rank 1 and world_size=3 on rank 0"),
        ([2, 3], "world_size=2 on rank 0 and world_size=3 on rank 1"),
        ([5, 5, 4, 5], "world_size=4 on rank 2 and world_size=5 on rank 0"),
    ],
)
@pytest.mark.parametrize("lasting", [False, True])
def test_world_sizes_that_differ_are_named_on_all_ranks(sizes, found, lasting) -> None:
    assert all(f"Found {found}" in error for error in errors_of(sizes, lasting))


def test_a_rank_beyond_the_world_is_told_once_the_world_has_formed() -> None:
    store = dist.HashStore()
    form(store, 2)
    with pytest.raises(LaunchError, match="Found world_size=2 on rank 0 and world_size=3 on rank 2"):
        agree_on_world(store, member(2, 3), 20.0)


def test_a_world_of_one_is_told_of_by_those_who_come_to_it() -> None:
    store = dist.HashStore()
    agree_on_world(store, member(0, 1), 0.0)
    found = "Found world_size=1 on rank 0 and world_size=2 on rank 1"
    with pytest.raises(LaunchError, match=found):
        agree_on_world(store, member(1, 2), 20.0)
    with pytest.raises(LaunchError, match=found):  # a later one may form in a store that lasts, and does not
        agree_on_world(store, member(1, 2), 0.2, lasting=True)


def test_a_rank_that_rank_0_does_not_answer_gives_up() -> None:
    with pytest.raises(LaunchError, match="Rank 1 must reach rank 0 at node0:29500 within 0.1 s. Found its store"):
        agree_on_world(dist.HashStore(), member(1, 2), 0.1)
