"""What clients see when a server is full, slow, broken or about to end, and what it sees of clients that go away."""

import asyncio
import json
import signal
import threading
import time
from typing import Any

import httpx
import pytest
import uvicorn
from served import ask, build_engine, post, serving, until

from colossal._src.inference.server.run import _Server

BODY = {"prompt": "hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


async def ask_and_leave(app: Any, path: str, body: dict[str, Any], *, after_chunks: int | None) -> list[bytes]:
    """Send a request as a server does, and disconnect: after some chunks of a stream, or before any answer."""
    sent: list[bytes] = []
    left = asyncio.Event()
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive() -> Any:
        for message in messages:
            return message
        if after_chunks is None:
            await asyncio.sleep(0.05)
        else:
            await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            sent.append(message["body"])
        if after_chunks is not None and len(sent) >= after_chunks:
            left.set()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "asgi": {}}
    await app(
        scope | {"http_version": "1.1", "scheme": "http", "root_path": "", "raw_path": path.encode()}, receive, send
    )
    return sent


@pytest.mark.parametrize(
    ("path", "body", "after_chunks"),
    [
        (COMPLETIONS, BODY, None),
        (COMPLETIONS, BODY | {"stream": True}, 2),
        ("/generation", {"prompt": "hello", "max_tokens": 60}, None),
    ],
)
def test_a_client_that_goes_away_frees_its_pages(path, body, after_chunks) -> None:
    engine = build_engine()
    step, steps = engine.step, []

    def slow_step() -> Any:
        time.sleep(0.01)
        steps.append(engine.statistics.num_used_pages)
        return step()

    engine.step = slow_step
    with serving(engine) as (service, app):

        async def work() -> None:
            sent = await ask_and_leave(app, path, body, after_chunks=after_chunks)
            assert len(sent) <= (after_chunks or 1) + 1
            await until(lambda: service.thread.is_idle)

        asyncio.run(asyncio.wait_for(work(), 30))
        assert service.thread.statistics.num_used_pages == 0
    assert len(steps) < 50, "it was generated to its end"


@pytest.mark.parametrize(
    ("path", "status", "body"), [(COMPLETIONS, 429, BODY), ("/generation", 406, {"prompt": "a", "max_tokens": 20})]
)
def test_all_get_an_answer_or_hear_that_the_queue_is_full(path, status, body) -> None:
    with serving(build_engine(max_batch_size=2), queue_size=3) as (service, app):

        async def flood(client: httpx.AsyncClient) -> list[httpx.Response]:
            return await asyncio.gather(*(client.post(path, json=body | {"max_tokens": 20}) for _ in range(20)))

        statuses = [answer.status_code for answer in ask(app, flood)]
        assert statuses.count(200) >= 5
        assert statuses.count(200) + statuses.count(status) == 20
        assert statuses.count(status) >= 1
        assert service.thread.is_idle


def test_a_full_queue_says_when_to_come_again() -> None:
    with serving(build_engine(max_batch_size=1), queue_size=0) as (_, app):

        async def two(client: httpx.AsyncClient) -> list[httpx.Response]:
            return await asyncio.gather(*(client.post(COMPLETIONS, json=BODY) for _ in range(2)))

        [refused] = [answer for answer in ask(app, two) if answer.status_code == 429]
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_a_request_that_takes_too_long_is_answered_by_504() -> None:
    with serving() as (_, app):
        answer = post(app, COMPLETIONS, **BODY, timeout_seconds=1e-5)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    with serving(timeout_seconds=1e-5) as (_, app):
        assert post(app, COMPLETIONS, **BODY, timeout_seconds=60).status_code == 504


def test_a_step_that_fails_is_answered_and_health_says_so() -> None:
    engine = build_engine()
    step = engine.step

    def fail_later() -> Any:
        if engine.statistics.num_generated_tokens > 4:
            raise RuntimeError("lost rank 1")
        return step()

    engine.step = fail_later
    with serving(engine) as (_, app):
        assert ask(app, lambda client: client.get("/health")).json() == {"status": "ok", "reason": None}
        streamed = post(app, COMPLETIONS, **BODY, stream=True)
        assert streamed.status_code == 200
        last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert "lost rank 1" in last["error"]["message"]
        assert post(app, COMPLETIONS, **BODY).status_code == 503
        health = ask(app, lambda client: client.get("/health"))
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert "lost rank 1" in health.json()["reason"]


def test_a_step_that_waits_for_a_lost_rank_is_answered_and_health_says_so() -> None:
    engine = build_engine()
    is_waiting, has_ended = threading.Event(), threading.Event()

    def wait() -> Any:
        is_waiting.set()
        has_ended.wait()
        return []

    engine.step = wait
    with serving(engine) as (service, app):

        async def work(client: httpx.AsyncClient) -> None:
            asking = [asyncio.create_task(client.post(COMPLETIONS, json=BODY)) for _ in range(3)]
            await until(is_waiting.is_set)
            service.thread.fail("Found that rank 1 has ended.")
            answers = [*await asyncio.gather(*asking), await client.post(COMPLETIONS, json=BODY)]
            assert {answer.status_code for answer in answers} == {503}
            assert all("rank 1 has ended" in answer.json()["error"]["message"] for answer in answers)
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "failed")
            has_ended.set()

        ask(app, work)


def test_a_step_that_hangs_is_answered_and_health_says_so() -> None:
    engine = build_engine()
    has_ended = threading.Event()

    def hang() -> Any:
        has_ended.wait()
        return []

    engine.step = hang
    with serving(engine, step_timeout_seconds=0.05) as (service, app):

        async def work(client: httpx.AsyncClient) -> None:
            answers = await asyncio.gather(*(client.post(COMPLETIONS, json=BODY) for _ in range(3)))
            answers += [await client.post(COMPLETIONS, json=BODY)]
            assert {answer.status_code for answer in answers} == {503}
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "failed")
            assert "within step_timeout=0.05 s" in health.json()["reason"]

        ask(app, work)
        reason = service.thread.refusal
        has_ended.set()
    assert service.thread.refusal == reason, "what follows from it is not the reason"
    assert service.thread.failure is not None


def test_the_time_between_requests_is_not_that_of_a_step() -> None:
    with serving(build_engine()) as (service, app):

        async def work(client: httpx.AsyncClient) -> None:
            assert (await client.post(COMPLETIONS, json=BODY)).status_code == 200
            await until(lambda: service.thread._began_at is None)

        ask(app, work)


def test_a_server_that_stops_finishes_what_runs_and_refuses_the_rest() -> None:
    with serving() as (service, app):

        async def work(client: httpx.AsyncClient) -> None:
            running = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
            await until(lambda: not service.thread.is_idle)
            service.thread.drain()
            refused, health = await client.post(COMPLETIONS, json=BODY), await client.get("/health")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (health.status_code, health.json()["status"]) == (503, "stopping")
            answer = await running
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 60)

        ask(app, work)


def test_the_time_of_running_requests_ends() -> None:
    engine = build_engine()
    step = engine.step
    engine.step = lambda: (time.sleep(0.02), step())[1]
    with serving(engine) as (service, app):
        server = _Server(uvicorn.Config(app), service.thread, grace_seconds=0.2)

        async def work(client: httpx.AsyncClient) -> None:
            assert not await server.on_tick(1)
            running = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
            await until(lambda: not service.thread.is_idle)
            server.handle_exit(signal.SIGTERM, None)
            assert not await server.on_tick(1)
            assert not running.done()
            await server.on_tick(1)
            answer = await running
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable_error")
            assert await server.on_tick(1)

        ask(app, work)
