"""A server as a process: clients of OpenAI as they are, a thousand requests at once, and how it ends."""

import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import build_model, build_tokenizer, expected_text

import colossal
from colossal._src.testing.limits import scaled

pytestmark = pytest.mark.slow

SOURCE = Path(colossal.__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
LONG = {"prompt": "hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
LONGER = LONG | {"max_tokens": 1000, "n": 8}
"""It runs for seconds, so that clients and tests can do something meanwhile."""
WITH_LONGER = ("--max_output_len", "1000")


class Server:
    """A process that listens."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def connect(self) -> openai.OpenAI:
        """A client, which the caller closes."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        """One of the metrics."""
        found = re.search(rf"^colossal_{name} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def wait_for(self, name: str, value: float) -> None:
        """Wait until a metric is at least, or for zero at most, as high."""
        deadline = time.monotonic() + scaled(30)
        while (self.metric(name) != 0) if value == 0 else (self.metric(name) < value):
            assert time.monotonic() < deadline, name
            time.sleep(0.01)


@contextmanager
def started(folder: Path, *options: str) -> Iterator[Server]:
    """Start `colossal serve` with a port of its own."""
    command = [sys.executable, "-m", "colossal.cli", "serve", str(folder), "--port", "0", *options]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        else:
            pytest.fail("".join(lines))
        drain = threading.Thread(target=process.stderr.read)
        drain.start()
        yield Server(process, found[1])
    finally:
        process.kill()
        process.wait()
    drain.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_model(positions=4096).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    with started(folder, "--max_batch_size", "8", "--queue_size", "32", *WITH_LONGER) as server:
        yield server


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with server.connect() as client:
        yield client


def test_the_client_of_openai_completes_and_streams(client) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny"
    expected = expected_text("hello", 24)
    found = client.completions.create(model=model.id, prompt="hello", max_tokens=24, logprobs=1, **GREEDY)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (expected, "length")
    assert len(found.choices[0].logprobs.token_logprobs) == found.usage.completion_tokens == 24
    with client.completions.create(model=model.id, prompt="hello", max_tokens=24, stream=True, **GREEDY) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_the_client_of_openai_chats_and_streams(client) -> None:
    chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, **GREEDY}
    expected = expected_text("<user>hello<assistant>", 24)
    assert client.chat.completions.create(**chat).choices[0].message.content == expected
    with client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert last.usage.completion_tokens == 24


def test_the_client_of_openai_reads_errors(client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", best_of=3)
    assert caught.value.param == "best_of"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="large", prompt="x")


def test_a_thousand_requests_each_have_an_answer_or_429(server, client) -> None:
    expected = expected_text("hello", 8)

    def ask(_: int) -> str:
        try:
            found = client.completions.create(model="tiny", prompt="hello", max_tokens=8, **GREEDY)
        except openai.RateLimitError:
            return "429"
        return "answer" if found.choices[0].text == expected else "wrong"

    with ThreadPoolExecutor(64) as pool:
        counts = Counter(pool.map(ask, range(1000)))
    assert counts.keys() <= {"answer", "429"}
    assert counts.total() == 1000
    assert counts["answer"] >= 40
    server.wait_for("pages_used", 0)
    assert (server.metric("running"), server.metric("waiting")) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_pages(server, stream) -> None:
    before = server.metric("generated_tokens_total")
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.Client() as client,
        client.stream("POST", f"{server.url}/v1/completions", json=LONGER | {"stream": True})
        if stream
        else _left_alone(client, f"{server.url}/v1/completions", pool),
    ):
        server.wait_for("pages_used", 1)
    server.wait_for("pages_used", 0)
    assert server.metric("generated_tokens_total") - before < 8 * 1000


@pytest.mark.parametrize("axis", ["--tp", "--pp"])
def test_ranks_shard_the_model_and_end_with_the_server(folder, axis) -> None:
    with started(folder, axis, "2") as server:
        ranks = ranks_of(server)
        assert len(ranks) == 1
        with server.connect() as client:
            found = client.completions.create(model="tiny", prompt="hello", max_tokens=24, logprobs=1, **GREEDY)
            echo = client.completions.create(model="tiny", prompt="hello", max_tokens=1, logprobs=1, echo=True)
        assert found.choices[0].text == expected_text("hello", 24)
        assert echo.choices[0].logprobs is not None
        time.sleep(2.5)  # idle, as ranks wait for steps
        answer = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=scaled(60))
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 100)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(scaled(30)) in {0, -signal.SIGTERM}
        assert not any(map(is_running, ranks))


@pytest.mark.parametrize(("axis", "is_idle"), [("--tp", False), ("--tp", True), ("--pp", False)])
def test_a_rank_that_is_killed_is_answered_to_all_clients(folder, axis, is_idle) -> None:
    with started(folder, axis, "2", *WITH_LONGER) as server, ThreadPoolExecutor(8) as pool:
        [rank] = ranks_of(server)
        ask = functools.partial(httpx.post, f"{server.url}/v1/completions", json=LONGER, timeout=scaled(60))
        waiting = [] if is_idle else [pool.submit(ask) for _ in range(8)]
        if not is_idle:
            server.wait_for("pages_used", 1)
        os.kill(rank, signal.SIGKILL)
        killed_at = time.monotonic()
        answers = [each.result() for each in waiting]
        while (health := httpx.get(f"{server.url}/health")).status_code == 200:
            assert time.monotonic() - killed_at < scaled(10)
            time.sleep(0.05)
        assert time.monotonic() - killed_at < scaled(10)
        assert {answer.status_code for answer in [*answers, ask()]} == {503}
        assert health.json()["status"] == "failed"
        assert f"process {rank}" in health.json()["reason"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(scaled(30)) in {1, -signal.SIGTERM}


@pytest.mark.parametrize("axis", ["--tp", "--pp"])
def test_a_rank_that_hangs_is_answered_to_all_clients(folder, axis) -> None:
    options = (axis, "2", "--step_timeout", f"{scaled(3):g}")
    with started(folder, *options, *WITH_LONGER) as server, ThreadPoolExecutor(8) as pool:
        [rank] = ranks_of(server)
        ask = functools.partial(httpx.post, f"{server.url}/v1/completions", json=LONGER, timeout=scaled(60))
        waiting = [pool.submit(ask) for _ in range(8)]
        server.wait_for("pages_used", 1)
        os.kill(rank, signal.SIGSTOP)
        answers = [each.result() for each in waiting]
        assert {answer.status_code for answer in [*answers, ask()]} == {503}
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "within step_timeout=" in health.json()["reason"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(scaled(30)) in {1, -signal.SIGTERM}
        assert not is_running(rank)


def test_ranks_end_when_the_server_is_killed(folder) -> None:
    with started(folder, "--tp", "2") as server:
        ranks = ranks_of(server)
        server.process.kill()
        deadline = time.monotonic() + scaled(10)
        while any(map(is_running, ranks)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_what_ranks_cannot_shard_is_refused(folder) -> None:
    command = [sys.executable, "-m", "colossal.cli", "serve", str(folder), "--tp", "3", "--port", "0"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "for tp=3. Choose one of 1, 2, 4." in done.stderr


def ranks_of(server: Server) -> list[int]:
    """The processes that the server has started."""
    pids = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    return [pid for pid in pids if status_of(pid).get("PPid") == str(server.process.pid)]


def is_running(pid: int) -> bool:
    return status_of(pid).get("State", "Z")[0] != "Z"


def status_of(pid: int) -> dict[str, str]:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


@contextmanager
def _left_alone(client: httpx.Client, url: str, pool: ThreadPoolExecutor) -> Iterator[None]:
    """A request whose client closes the connection before there is an answer."""

    def ask() -> None:
        with pytest.raises(httpx.ReadTimeout):
            client.post(url, json=LONGER, timeout=0.2)

    asking = pool.submit(ask)
    yield
    asking.result()


def test_sigterm_finishes_what_runs_and_refuses_the_rest(folder) -> None:
    with started(folder, *WITH_LONGER) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONGER, timeout=scaled(60))
        server.wait_for("pages_used", 1)
        server.process.send_signal(signal.SIGTERM)
        statuses = {httpx.post(f"{server.url}/v1/completions", json=LONG).status_code}
        assert statuses == {503}
        answer = running.result()
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8000)
        assert server.process.wait(scaled(30)) in {0, -signal.SIGTERM}
