"""The routes of a server, asked in this process: answers equal those of the model, errors name their field."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from served import ask, build_engine, build_model, build_tokenizer, expected_text, post, serving

from colossal.inference import InferenceEngine, SamplingParams

GREEDY = {"temperature": 0, "ignore_eos": True}
CHAT = [{"role": "user", "content": "hello"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def get(app: FastAPI, path: str) -> httpx.Response:
    return ask(app, lambda client: client.get(path))


@pytest.fixture(scope="module")
def engine() -> InferenceEngine:
    return build_engine()


@pytest.fixture
def app(engine) -> Any:
    with serving(engine) as (_, app):
        yield app


# ------------------------------------------------------------------------------------------ completions


def test_a_completion_is_what_the_model_generates(app) -> None:
    found = post(app, COMPLETIONS, prompt="hello", max_tokens=24, model="tiny", **GREEDY).json()
    assert found["choices"] == [
        {"index": 0, "text": expected_text("hello", 24), "logprobs": None, "finish_reason": "length"}
    ]
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}
    assert (found["object"], found["model"]) == ("text_completion", "tiny")


def test_many_prompts_have_choices_in_their_order(app) -> None:
    prompts = ["hello", "abc"]
    found = post(app, COMPLETIONS, prompt=prompts, n=2, echo=True, max_tokens=6, **GREEDY).json()["choices"]
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    assert [choice["text"] for choice in found] == [text + expected_text(text, 6) for text in prompts for _ in range(2)]
    tokens = [build_tokenizer()(prompt)["input_ids"] for prompt in prompts]
    as_tokens = post(app, COMPLETIONS, prompt=tokens, n=2, echo=True, max_tokens=6, **GREEDY).json()["choices"]
    assert as_tokens == found


def test_a_stream_has_the_same_text_in_pieces(app) -> None:
    body = {"prompt": ["hello", "abc"], "max_tokens": 24, "echo": True} | GREEDY
    whole = post(app, COMPLETIONS, **body).json()
    *chunks, last = chunks_of(post(app, COMPLETIONS, stream=True, stream_options={"include_usage": True}, **body))
    assert len(chunks) > 4
    for choice in whole["choices"]:
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_log_probabilities_are_those_of_the_engine(app) -> None:
    body = {"prompt": "hello", "max_tokens": 8, "logprobs": 2} | GREEDY
    found = post(app, COMPLETIONS, **body).json()["choices"][0]["logprobs"]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    expected = build_engine().generate("hello", params)[0].outputs[0].logprobs
    assert found["token_logprobs"] == pytest.approx([entry.logprob for entry in expected])
    assert [list(top.values()) for top in found["top_logprobs"]] == [
        pytest.approx(list(entry.top.values())) for entry in expected
    ]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(post(app, COMPLETIONS, stream=True, **body))]
    assert [token for each in streamed if each for token in each["tokens"]] == found["tokens"]


def test_a_prompt_that_is_echoed_has_log_probabilities_too(app) -> None:
    body = {"prompt": ["hello", "abc"], "max_tokens": 4, "logprobs": 2, "echo": True} | GREEDY
    found = post(app, COMPLETIONS, **body).json()["choices"]
    for choice, prompt in zip(found, body["prompt"], strict=True):
        ids = torch.tensor([build_tokenizer()(prompt)["input_ids"]])
        with torch.no_grad():
            expected = build_model()(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
        logprobs, length = choice["logprobs"], len(prompt)
        assert logprobs["tokens"][:length] == list(prompt)
        assert logprobs["token_logprobs"][:length] == [None, *map(pytest.approx, expected)]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == length + 4
        assert logprobs["text_offset"][: length + 1] == list(range(length + 1))
    plain = post(app, COMPLETIONS, **body | {"echo": False}).json()["choices"]
    assert plain[0]["logprobs"]["token_logprobs"] == found[0]["logprobs"]["token_logprobs"][5:]
    streamed = [chunk["choices"][0] for chunk in chunks_of(post(app, COMPLETIONS, stream=True, **body))]
    values = [value for each in streamed if each["index"] == 0 for value in each["logprobs"]["token_logprobs"]]
    assert values == found[0]["logprobs"]["token_logprobs"]


def test_seed_and_stop_and_penalties_reach_the_sampler(app) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 1.5, "seed": 3, "frequency_penalty": 0.5}
    texts = {post(app, COMPLETIONS, **body).json()["choices"][0]["text"] for _ in range(2)}
    assert len(texts) == 1
    assert post(app, COMPLETIONS, **body | {"seed": 4}).json()["choices"][0]["text"] not in texts
    full = expected_text("hello", 24)
    stopped = post(app, COMPLETIONS, prompt="hello", max_tokens=24, stop=[full[10:12]], **GREEDY).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (full[: full.index(full[10:12])], "stop")


# ------------------------------------------------------------------------------------------ chats


def test_a_chat_is_the_template_of_the_tokenizer_continued(app) -> None:
    expected = expected_text("<user>hello<assistant>", 12)
    body = {"messages": CHAT, "max_tokens": 12, "logprobs": True, "top_logprobs": 1} | GREEDY
    found = post(app, CHATS, **body).json()
    [choice] = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
    assert (found["object"], choice["finish_reason"]) == ("chat.completion", "length")
    assert len(choice["logprobs"]["content"]) == 12
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(post(app, CHATS, stream=True, **body))]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == expected
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "ello"}]}]
    assert post(app, CHATS, **body | {"messages": parts}).json()["choices"] == [choice]


def test_what_the_template_does_not_take_is_refused_with_its_reason(app) -> None:
    error = error_of(post(app, CHATS, messages=[{"role": "tool", "content": "x"}]), 400)
    assert "no tools" in error["message"]


def test_a_tokenizer_without_a_template_refuses_chats() -> None:
    engine = build_engine()
    engine.tokenizer = type(engine.tokenizer)(tokenizer_object=engine.tokenizer.backend_tokenizer)
    with serving(engine) as (_, app):
        assert "chat template" in error_of(post(app, CHATS, messages=CHAT), 400)["message"]


def test_a_model_without_a_tokenizer_takes_and_counts_tokens(engine) -> None:
    with serving(InferenceEngine(engine.model, None, engine.config)) as (_, app):
        found = post(app, COMPLETIONS, prompt=[5, 6], max_tokens=4, logprobs=0, **GREEDY).json()
        assert all(token.startswith("token_id:") for token in found["choices"][0]["logprobs"]["tokens"])
        assert (found["choices"][0]["text"], found["usage"]["completion_tokens"]) == ("", 4)
        for body in ({"prompt": "x"}, {"prompt": [5], "stop": "x"}, {"prompt": [5], "echo": True}):
            assert "tokenizer" in error_of(post(app, COMPLETIONS, **body), 400)["message"]
        assert "tokenizer" in error_of(post(app, CHATS, messages=CHAT), 400)["message"]


# ------------------------------------------------------------------------------------------ malformed bodies


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        (COMPLETIONS, {}, "prompt", "required"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "at least 1"),
        (COMPLETIONS, {"prompt": []}, "prompt", "at least 1"),
        (COMPLETIONS, {"prompt": [[5, "a"]]}, "prompt[0][1]", "integer"),
        (COMPLETIONS, {"prompt": [300]}, "prompt", "below 257"),
        (COMPLETIONS, {"prompt": "x" * 65}, "prompt", "at most 64 tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 65}, "max_tokens", "at most 64 tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens", "Found '5'"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "Found 0"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature", "Found -1"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p", "Found 0"),
        (COMPLETIONS, {"prompt": "x", "n": 1000}, "n", "outputs are generated at once"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a", ""]}, "stop[1]", "at least 1"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of", "use n"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options", "set stream to true"),
        (CHATS, {"messages": CHAT, "top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs", "Found 21"),
        (COMPLETIONS, {"prompt": "x", "warmth": 1}, "warmth", "Unknown field"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"a": 1}}, "stream_options.a", "Unknown field"),
        (CHATS, {"messages": []}, "messages", "at least 1"),
        (CHATS, {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role", "user"),
        (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (CHATS, {"messages": CHAT, "tools": [{"type": "function"}]}, "tools", "no tools"),
        (CHATS, {"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format", "grammar"),
        ("/generation", {"prompt": "x"}, "max_tokens", "required"),
        ("/generation", {"prompt": "x", "max_tokens": 257}, "max_tokens", "256"),
        ("/generation", {"prompt": "x", "max_tokens": 8, "temperature": 0}, "temperature", "Found 0"),
    ],
)
def test_a_body_that_is_wrong_is_refused_by_its_field(app, path, body, field, message) -> None:
    error = error_of(post(app, path, **body), 400)
    assert error["param"] == field
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b""])
def test_a_body_that_is_no_object_is_refused(app, content) -> None:
    headers = {"content-type": "application/json"}
    answer = ask(app, lambda client: client.post(COMPLETIONS, content=content, headers=headers))
    assert "JSON object" in error_of(answer, 400)["message"]


@pytest.mark.parametrize(
    ("path", "content", "field"),
    [
        (CHATS, b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages[0].content"),
        (COMPLETIONS, b'{"prompt": "x", "stop": "\\ud83d"}', "stop"),
        (COMPLETIONS, b'{"prompt": "\\ud83d"}', "prompt"),
    ],
)
def test_half_a_character_is_refused(app, path, content, field) -> None:
    headers = {"content-type": "application/json"}
    error = error_of(ask(app, lambda client: client.post(path, content=content, headers=headers)), 400)
    assert (error["param"], "nicode" in error["message"]) == (field, True)


def test_no_temperature_ends_the_engine(app) -> None:
    greedy = post(app, COMPLETIONS, prompt="hello", max_tokens=4, **GREEDY).json()["choices"]
    for temperature in (1e-320, 1e-40):
        body = {"prompt": "hello", "max_tokens": 4} | GREEDY | {"temperature": temperature}
        assert post(app, COMPLETIONS, **body).json()["choices"] == greedy


def test_as_many_outputs_as_are_best_are_returned(app) -> None:
    body = {"prompt": "hello", "max_tokens": 2} | GREEDY
    for n in (None, 1, 2):
        assert len(post(app, COMPLETIONS, n=n, best_of=n or 1, **body).json()["choices"]) == (n or 1)


def test_the_template_of_a_chat_has_names(engine, monkeypatch) -> None:
    template = "{% for message in messages %}{{ message.name }}: {{ message.content }}{% endfor %}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    with serving(engine) as (_, app):
        body = {"messages": [{"role": "user", "content": "hello", "name": "ann"}], "max_tokens": 1}
        assert post(app, CHATS, **body).json()["usage"]["prompt_tokens"] == len("ann: hello")


def test_long_bodies_are_refused_with_and_without_a_length(engine) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 600

    with serving(engine, max_body_bytes=1000) as (_, app):
        assert "1000 bytes" in error_of(post(app, COMPLETIONS, prompt="x" * 1000), 413)["message"]
        answer = ask(app, lambda client: client.post(COMPLETIONS, content=pieces()))
        assert "1000 bytes" in error_of(answer, 413)["message"]


def test_another_model_and_another_path_are_not_found(app) -> None:
    error = error_of(post(app, COMPLETIONS, prompt="x", model="large"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error_of(get(app, "/v2/completions"), 404)
    assert error_of(get(app, COMPLETIONS), 405)


# ------------------------------------------------------------------------------------------ generation


def test_generation_answers_with_prompt_and_output(app) -> None:
    [text] = {post(app, "/generation", prompt="hello", max_tokens=8, top_k=1).json()["text"] for _ in range(2)}
    assert text == "hello" + expected_text("hello", 8)


def test_generation_answers_with_one_of_the_results_in_its_cache(engine) -> None:
    with serving(engine, cache_size=2, cache_list_size=2) as (service, app):
        body = {"prompt": "hello", "max_tokens": 8, "temperature": 5.0}
        first = {post(app, "/generation", **body).json()["text"] for _ in range(2)}
        computed = service.thread.statistics.num_generated_tokens
        assert {post(app, "/generation", **body).json()["text"] for _ in range(20)} == first
        assert service.thread.statistics.num_generated_tokens == computed
        post(app, "/generation", **body | {"temperature": 4.0})
        assert service.thread.statistics.num_generated_tokens > computed


# ------------------------------------------------------------------------------------------ state


def test_the_model_is_listed(app) -> None:
    [model] = get(app, "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 128)
    assert get(app, "/v1/models/tiny").json() == model
    error_of(get(app, "/v1/models/large"), 404)


def test_metrics_count_tokens_and_time_to_first_token(app) -> None:
    post(app, COMPLETIONS, prompt="metrics", max_tokens=8, **GREEDY)
    text = get(app, "/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["colossal_generated_tokens_total"]) >= 8
    assert float(values["colossal_pages_used"]) == 0
    assert float(values["colossal_time_to_first_token_seconds_count"]) == 1
    for name in ("running", "waiting", "pages", "prefix_hit_tokens_total", "preempted_total", "prompt_tokens_total"):
        assert f"colossal_{name}" in values


def test_docs_describe_the_routes(app) -> None:
    assert get(app, "/docs").status_code == 200
    paths = get(app, "/openapi.json").json()["paths"]
    assert {COMPLETIONS, CHATS, "/generation", "/v1/models", "/health", "/metrics"} <= set(paths)
