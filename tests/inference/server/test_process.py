"""A server as a process: clients of OpenAI as they are, a thousand requests at once, and how it ends."""

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
from contextlib import contextmanager
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
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
LONG = {"prompt": "hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True}


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
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
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
    build_model().save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    with started(folder, "--max_batch_size", "8", "--queue_size", "32") as server:
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
        client.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True, "n": 8})
        if stream
        else _left_alone(client, f"{server.url}/v1/completions", pool),
    ):
        server.wait_for("pages_used", 1)
    server.wait_for("pages_used", 0)
    assert server.metric("generated_tokens_total") - before < 8 * 100


@contextmanager
def _left_alone(client: httpx.Client, url: str, pool: ThreadPoolExecutor) -> Iterator[None]:
    """A request whose client closes the connection before there is an answer."""

    def ask() -> None:
        with pytest.raises(httpx.ReadTimeout):
            client.post(url, json=LONG | {"n": 8}, timeout=0.2)

    asking = pool.submit(ask)
    yield
    asking.result()


def test_sigterm_finishes_what_runs_and_refuses_the_rest(folder) -> None:
    with started(folder) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG | {"n": 4}, timeout=scaled(60))
        server.wait_for("pages_used", 1)
        server.process.send_signal(signal.SIGTERM)
        statuses = {httpx.post(f"{server.url}/v1/completions", json=LONG).status_code}
        assert statuses == {503}
        answer = running.result()
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 400)
        assert server.process.wait(scaled(30)) in {0, -signal.SIGTERM}
