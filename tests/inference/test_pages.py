"""No page is lost or owned twice, whatever is added and aborted, and prefixes are found as long as they are there."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal._src.inference.chunking import AnyChunks, Chunking, FixedChunks
from colossal._src.inference.pages import ROOT_HASH, PagePool, hash_page
from colossal._src.inference.requests import Sequence
from colossal._src.inference.sampling_params import SamplingParams
from colossal._src.inference.scheduler import Scheduler
from colossal.errors import ConfigError


def hashes_of(*pages: list[int]) -> list[bytes]:
    hashes = [ROOT_HASH]
    for page in pages:
        hashes.append(hash_page(hashes[-1], page))
    return hashes[1:]


def test_a_hash_is_that_of_all_tokens_before() -> None:
    assert hashes_of([1, 2], [3, 4])[1] == hashes_of([1, 2], [3, 4], [5, 6])[1]
    assert hashes_of([1, 2], [3, 4])[1] != hashes_of([2, 1], [3, 4])[1]


def test_a_prefix_is_shared_and_counted() -> None:
    pool = PagePool(4, 2)
    first = pool.allocate(2)
    hashes = hashes_of([1, 2], [3, 4])
    for page, digest in zip(first, hashes, strict=True):
        pool.register(page, digest)
    found = pool.match([*hashes, b"another"])
    assert found == first
    pool.share(found)
    pool.check_integrity([first, found])
    pool.release(first)
    assert pool.num_free == 2
    pool.release(found)
    assert (pool.num_free, pool.num_cached) == (4, 2)


def test_pages_without_a_prefix_go_first_and_then_the_end_of_the_oldest_prefix() -> None:
    pool = PagePool(4, 2)
    old, new = pool.allocate(2), pool.allocate(1)
    for pages, hashes in ((old, hashes_of([1, 2], [3, 4])), (new, hashes_of([5, 6]))):
        for page, digest in zip(pages, hashes, strict=True):
            pool.register(page, digest)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(3) == [4, old[1], old[0]]
    assert pool.match(hashes_of([5, 6])) == new


def test_shared_pages_that_are_free_do_not_count_as_room() -> None:
    pool = PagePool(2, 2)
    [page] = pool.allocate(1)
    pool.register(page, b"a")
    pool.release([page])
    assert pool.can_allocate(2)
    assert pool.can_allocate(1, shared=[page])
    assert not pool.can_allocate(2, shared=[page])


def test_a_page_is_released_and_registered_only_by_an_owner() -> None:
    pool = PagePool(2, 2)
    pages = pool.allocate(2)
    with pytest.raises(ConfigError, match="Found 0 of 2 free"):
        pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ConfigError, match="is released by its owner"):
        pool.release(pages[:1])
    with pytest.raises(ConfigError, match="is registered by its owner"):
        pool.register(pages[0], b"a")
    with pytest.raises(ConfigError, match="in the tables of its owners"):
        pool.check_integrity([pages])
    with pytest.raises(ConfigError, match="num_pages=0"):
        PagePool(0, 2)


# ------------------------------------------------------------------------------------------ random programs

REQUEST = st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 12), st.integers(1, 3))
"""Which tokens, how many of them, how many at most in the output, and how many outputs."""
PROGRAM = st.lists(st.one_of(REQUEST, st.integers(0, 9), st.none()), min_size=1)
"""Requests that are added, numbers of those that are aborted, and steps."""


class Simulation:
    """A scheduler without a model, whose pool is looked at after each act."""

    def __init__(self, chunking: Chunking, reserve: float) -> None:
        self.pool = PagePool(10, 4)
        self.scheduler = Scheduler(self.pool, chunking, max_batch_size=3, max_tokens=9, output_reserve=reserve)
        self.live: list[Sequence] = []

    def add(self, token: int, length: int, max_tokens: int, count: int) -> None:
        prompt = tuple((token + index) % 3 for index in range(length))
        sequences = [Sequence(prompt, SamplingParams(), max_tokens, index=index) for index in range(count)]
        for sequence in sequences:
            sequence.leader = sequences[0] if sequence.index else None
            assert self.scheduler.can_hold(sequence)
            self.scheduler.add(sequence)
        self.live += sequences

    def abort(self, number: int) -> None:
        if self.live:
            self.scheduler.finish(self.live.pop(number % len(self.live)), "abort")

    def step(self) -> bool:
        plan = self.scheduler.plan()
        assert all(chunk.length > 0 for chunk in plan)
        self.scheduler.check_integrity()
        self.scheduler.advance(plan)
        for sequence in [chunk.sequence for chunk in plan]:
            assert len(sequence.table) == self.pool.pages_for(sequence.num_computed)
            if sequence.num_computed == sequence.num_tokens:
                sequence.outputs.append(sequence.num_tokens % 3)
                if sequence.reason_to_finish():
                    self.scheduler.finish(sequence, "length")
                    self.live.remove(sequence)
        return bool(plan)


def run(program: list[tuple[int, int, int, int] | int | None], chunking: Chunking, reserve: float) -> int:
    """Run a program to its end, and return how many requests it added or aborted."""
    simulation = Simulation(chunking, reserve)
    for act in program:
        if isinstance(act, tuple):
            simulation.add(*act)
        elif act is None:
            simulation.step()
        else:
            simulation.abort(act)
        simulation.scheduler.check_integrity()
    while simulation.live:
        assert simulation.step(), "sequences wait, and nothing is computed"
    assert simulation.pool.num_free == simulation.pool.num_pages
    return sum(act is not None for act in program)


@pytest.mark.parametrize("chunking", [AnyChunks(), FixedChunks(8)])
@settings(max_examples=40)
@given(PROGRAM, st.sampled_from([0.0, 0.5, 1.0]))
def test_no_page_is_lost(chunking: Chunking, program: list[tuple[int, int, int, int] | int | None], reserve) -> None:
    run(program, chunking, reserve)


@pytest.mark.slow
def test_no_page_is_lost_in_ten_thousand_additions_and_aborts() -> None:
    counts: list[int] = []

    @settings(max_examples=3000)
    @given(PROGRAM, st.sampled_from([AnyChunks(), FixedChunks(8)]), st.sampled_from([0.0, 0.5, 1.0]))
    def check(program: list[tuple[int, int, int, int] | int | None], chunking: Chunking, reserve: float) -> None:
        counts.append(run(program, chunking, reserve))

    check()
    assert sum(counts) >= 10_000


def test_all_pages_reserved_means_no_preemption() -> None:
    pool = PagePool(10, 4)
    scheduler = Scheduler(pool, AnyChunks(), max_batch_size=3, max_tokens=99, output_reserve=1.0)
    for token in range(3):
        scheduler.add(Sequence((token,) * 8, SamplingParams(), 12))
    assert [chunk.length for chunk in scheduler.plan()] == [8, 8]
    assert (len(scheduler.waiting), pool.num_free) == (1, 6)


def test_the_last_that_came_loses_its_pages_and_is_the_first_that_waits() -> None:
    pool = PagePool(5, 4)
    scheduler = Scheduler(pool, AnyChunks(), max_batch_size=3, max_tokens=99, output_reserve=0.0)
    sequences = [Sequence((token,) * 8, SamplingParams(), 8) for token in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(2):
        scheduler.advance(scheduler.plan())
        for sequence in scheduler.running:
            sequence.outputs.append(9)
    assert scheduler.num_preempted == 1
    assert scheduler.running == sequences[:1]
    assert list(scheduler.waiting) == sequences[1:]
    starts = [sequence.num_computed for sequence in sequences]
    assert all(before >= after for before, after in pairwise(starts))
