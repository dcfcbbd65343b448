"""The documented names: rules of batches by a scripted queue, the cache, and the engine that is launched."""

import asyncio
from collections import deque
from typing import Any

import pytest
import torch
from served import build_engine, build_model

from colossal.errors import ConfigError, UnsupportedError
from colossal.inference import (
    BatchManagerForGeneration,
    ListCache,
    MissCacheError,
    QueueFullError,
    SamplingParams,
    SubmitEntry,
    TaskEntry,
    launch_engine,
)


def entry(uid: int, max_tokens: int = 8, length: int = 2, **options: Any) -> SubmitEntry:
    return SubmitEntry(uid, {"input_ids": list(range(5, 5 + length)), "max_tokens": max_tokens, **options})


# ------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize(
    ("queue", "batches"),
    [
        ([entry(0), entry(1), entry(2)], [(0, 1), (2,)]),
        ([entry(0, 8), entry(1, 9)], [(0,), (1,)]),
        ([entry(0, 9), entry(1, 8)], [(0, 1)]),
        ([entry(0, top_k=5), entry(1, top_k=5, temperature=0.5)], [(0,), (1,)]),
        ([entry(0, top_p=0.5), entry(1), entry(2, top_p=0.5)], [(0,), (1,), (2,)]),
        ([entry(0, temperature=0.5), entry(1, temperature=0.5, max_tokens=1)], [(0, 1)]),
    ],
)
def test_those_that_follow_join_a_batch_by_the_documented_rules(queue, batches) -> None:
    waiting, manager = deque(queue), BatchManagerForGeneration(max_batch_size=2)
    found = []
    while waiting:
        found.append(manager.make_batch(waiting)[0].uids)
    assert found == batches


def test_prompts_are_padded_on_the_left_and_outputs_end_where_each_query_said() -> None:
    manager = BatchManagerForGeneration(max_batch_size=4, pad_token_id=1)
    waiting = deque([entry(0, 4, length=1, top_k=3), entry(1, 2, length=3, top_k=3)])
    task, keywords = manager.make_batch(waiting)
    assert task.batch["input_ids"].tolist() == [[1, 1, 5], [5, 6, 7]]
    assert task.batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert (task.batch["max_tokens"], task.batch["top_k"], task.batch["top_p"]) == (7, 3, None)
    rows = torch.tensor([[1, 1, 5, 20, 21, 22, 23], [5, 6, 7, 30, 31, 32, 33]])
    split = manager.split_batch(TaskEntry(task.uids, rows), **keywords)
    assert [(uid, tokens.tolist()) for uid, tokens in split] == [(0, [5, 20, 21, 22, 23]), (1, [5, 6, 7, 30, 31])]


# ------------------------------------------------------------------------------------------ the cache


def test_a_query_is_a_hit_when_all_its_results_are_there() -> None:
    cache = ListCache(cache_size=2, list_size=2)
    with pytest.raises(MissCacheError):
        cache.get("a")
    cache.add("a", 1)
    with pytest.raises(MissCacheError):
        cache.get("a")
    cache.add("a", 2)
    assert cache.get("a") == [1, 2]
    cache.add("a", 3)
    assert cache.get("a") == [2, 3]


def test_the_query_is_forgotten_that_was_longest_not_asked_for() -> None:
    cache = ListCache(cache_size=2, list_size=1)
    for key in ("a", "b"):
        cache.add(key, key)
    cache.get("a")
    cache.add("c", "c")
    assert (cache.get("a"), cache.get("c"), len(cache)) == (["a"], ["c"], 2)
    with pytest.raises(MissCacheError):
        cache.get("b")


def test_fixed_keys_stay() -> None:
    cache = ListCache(2, 1, fixed_keys=["a"])
    for key in "abcd":
        cache.add(key, key)
    assert (cache.get("a"), cache.get("d"), len(cache)) == (["a"], ["d"], 2)
    with pytest.raises(ConfigError, match="cache_size=1"):
        ListCache(1, 1, fixed_keys="ab")
    with pytest.raises(ConfigError, match="cache_size=0"):
        ListCache(0, 1)


# ------------------------------------------------------------------------------------------ the engine


QUERIES: dict[str, dict[str, Any]] = {
    "a": {"input_ids": [5, 6, 7], "max_tokens": 6},
    "b": {"input_ids": [8, 9], "max_tokens": 4},
    "c": {"input_ids": [10], "max_tokens": 9},
}


@pytest.mark.parametrize("manager", [None, BatchManagerForGeneration(max_batch_size=4)])
def test_a_launched_engine_answers_as_the_engine_does(manager) -> None:
    engine = build_engine()
    expected = {
        uid: data["input_ids"] + list(engine.generate(data["input_ids"], greedy(data))[0].outputs[0].token_ids)
        for uid, data in QUERIES.items()
    }

    async def work() -> dict[str, list[int]]:
        launched = launch_engine(1, 1, "localhost", 0, 0, build_engine, batch_manager=manager, max_batch_size=4)
        try:
            for uid, data in QUERIES.items():
                launched.submit(uid, data)
            with pytest.raises(ConfigError, match="'a', which is in use"):
                launched.submit("a", QUERIES["a"])
            return {uid: (await launched.wait(uid)).tolist() for uid in QUERIES}
        finally:
            launched.shutdown()

    assert asyncio.run(work()) == expected


def greedy(data: dict[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=data["max_tokens"])


def test_a_launched_engine_refuses_when_its_queue_is_full() -> None:
    async def work() -> None:
        manager = BatchManagerForGeneration(max_batch_size=1)
        launched = launch_engine(1, 1, "localhost", 0, 0, build_engine, batch_manager=manager, queue_size=1)
        try:
            launched.submit("a", QUERIES["a"])  # runs
            launched.submit("b", QUERIES["b"])
            with pytest.raises(QueueFullError, match="At most 1 queries"):
                launched.submit("c", QUERIES["c"])
            assert len(await launched.wait("b")) == 6
            with pytest.raises(ConfigError, match="no query 'c'"):
                await launched.wait("c")
            launched.submit("d", QUERIES["a"] | {"max_tokens": 1000})
            with pytest.raises(ConfigError, match="max_output_len"):
                await launched.wait("d")
        finally:
            launched.shutdown()

    asyncio.run(work())


def test_a_query_for_which_nobody_waits_is_ended() -> None:
    async def work() -> None:
        launched = launch_engine(1, 1, "localhost", 0, 0, build_engine, max_batch_size=1)
        try:
            for uid in ("a", "b", "c"):
                launched.submit(uid, QUERIES["a"] | {"max_tokens": 64})
            waiting = [asyncio.create_task(launched.wait(uid)) for uid in ("a", "b")]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            assert len(await launched.wait("c")) <= 3 + 64
            assert launched.engine.statistics.num_generated_tokens < 2 * 64
            assert launched.engine.statistics.num_used_pages == 0
        finally:
            launched.shutdown()

    asyncio.run(work())


def test_launching_takes_a_model_and_one_rank() -> None:
    launch_engine(1, 1, "localhost", 0, 0, build_model).shutdown()
    with pytest.raises(UnsupportedError, match="Found tp_world_size=2 and pp_world_size=1"):
        launch_engine(2, 1, "localhost", 0, 0, build_model)
