"""An engine in a thread: outputs reach the loop, and what nobody waits for any more costs nothing."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from served import build_engine, until

from colossal._src.inference.online import EngineThread
from colossal._src.inference.online.refusals import DeadlineError, QueueFullError, UnavailableError
from colossal.errors import ConfigError
from colossal.inference import InferenceEngine, SamplingParams

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def greedy(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


@contextmanager
def running(engine: InferenceEngine | None = None, **options: Any) -> Iterator[EngineThread]:
    thread = EngineThread(engine or build_engine(), **options).start()
    try:
        yield thread
    finally:
        thread.stop()


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 60))


class Gate:
    """Lets an engine make one step at a time, as a test allows them."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._steps = threading.Semaphore(0)
        self._step = engine.step
        engine.step = self._gated

    def _gated(self) -> Any:
        self._steps.acquire()
        return self._step()

    def open(self, num_steps: int) -> None:
        self._steps.release(num_steps)


def test_outputs_equal_those_of_the_engine_alone() -> None:
    expected = [output.outputs for output in build_engine().generate(PROMPTS, greedy())]
    with running() as thread:

        async def work() -> Any:
            submissions = [thread.submit([prompt], greedy()) for prompt in PROMPTS]
            return [await submission.result() for submission in submissions]

        assert [output.outputs for [output] in run(work)] == expected
        assert thread.is_idle


def test_updates_grow_and_the_last_one_is_finished() -> None:
    with running() as thread:

        async def work() -> Any:
            return [outputs[0] async for outputs in thread.submit(PROMPTS[:1], greedy()).updates()]

        outputs = run(work)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(lengths)
    assert outputs[-1].is_finished
    assert not any(output.is_finished for output in outputs[:-1])


def test_a_slow_reader_gets_all_with_one_update() -> None:
    with running() as thread:

        async def work() -> Any:
            submission = thread.submit(PROMPTS, greedy())
            await until(lambda: thread.is_idle)
            await asyncio.sleep(0)
            return [outputs async for outputs in submission.updates()]

        [outputs] = run(work)
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)


def test_pages_of_a_submission_that_is_closed_are_free_before_the_next_step() -> None:
    engine = build_engine()
    gate = Gate(engine)
    with running(engine) as thread:

        async def work() -> int:
            submission = thread.submit(PROMPTS, greedy(60))
            updates = submission.updates()
            gate.open(1)
            await anext(updates)
            submission.close()
            await updates.aclose()
            other = thread.submit(PROMPTS[:1], greedy(1))
            gate.open(2)  # one may wait at the gate already
            await other.result()
            return thread.statistics.num_used_pages

        assert run(work) == 0
        gate.open(100)
    assert engine.statistics.num_generated_tokens <= 3 + 3 + 1


def test_a_request_that_is_late_ends_with_an_error_and_others_go_on() -> None:
    with running() as thread:

        async def work() -> Any:
            late = thread.submit(PROMPTS[:1], greedy(60), timeout_seconds=1e-6)
            other = thread.submit(PROMPTS[1:2], greedy())
            with pytest.raises(DeadlineError, match="1e-06 seconds"):
                await late.result()
            return await other.result()

        [output] = run(work)
        assert len(output.outputs[0].token_ids) == 12
        assert thread.statistics.num_used_pages == 0


def test_a_full_queue_refuses_and_has_room_again() -> None:
    engine = build_engine(max_batch_size=2)
    gate = Gate(engine)
    with running(engine, max_waiting=1) as thread:

        async def work() -> None:
            first = [thread.submit([prompt], greedy(2)) for prompt in PROMPTS]
            with pytest.raises(QueueFullError, match="Found 3, and a request for 2 more"):
                thread.submit(PROMPTS[:1], greedy(2, n=2))
            gate.open(100)
            for submission in first:
                await submission.result()
            assert await thread.submit(PROMPTS, greedy(2)).result()

        run(work)


def test_a_wrong_request_is_refused_alone() -> None:
    with running() as thread:

        async def work() -> Any:
            wrong = thread.submit([[5], [10_000]], greedy())
            right = thread.submit(PROMPTS[:1], greedy())
            with pytest.raises(ConfigError, match="Tokens of a prompt"):
                await wrong.result()
            return await right.result()

        assert len(run(work)) == 1
        assert thread.is_idle
        assert thread.statistics.num_used_pages == 0


def test_a_step_that_fails_answers_all_that_wait() -> None:
    engine = build_engine()

    def fail() -> Any:
        raise MemoryError("no room")

    engine.step = fail
    with running(engine) as thread:

        async def work() -> None:
            submissions = [thread.submit([prompt], greedy()) for prompt in PROMPTS]
            for submission in submissions:
                with pytest.raises(UnavailableError, match="no room"):
                    await submission.result()
            with pytest.raises(UnavailableError, match="no room"):
                thread.submit(PROMPTS, greedy())

        run(work)
        assert isinstance(thread.failure, MemoryError)


def test_draining_finishes_what_runs_and_takes_nothing_else() -> None:
    with running() as thread:

        async def work() -> Any:
            submission = thread.submit(PROMPTS, greedy())
            thread.drain()
            with pytest.raises(UnavailableError, match="stopping"):
                thread.submit(PROMPTS, greedy())
            return await submission.result()

        assert all(output.is_finished for output in run(work))


def test_stopping_answers_those_that_wait() -> None:
    engine = build_engine()
    gate = Gate(engine)
    with running(engine) as thread:

        async def work() -> None:
            submission = thread.submit(PROMPTS, greedy(60))
            gate.open(1)
            await anext(submission.updates())
            stopping = asyncio.create_task(asyncio.to_thread(thread.stop))
            await asyncio.sleep(0.01)
            gate.open(100)
            with pytest.raises(UnavailableError, match="stop"):
                await submission.result()
            await stopping

        run(work)
