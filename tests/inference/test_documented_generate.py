"""`generate` by the keywords of earlier versions returns texts."""

from typing import Any

import numpy as np
import pytest
import torch
from decoders import build_decoder, generate, make_prompts
from transformers import GenerationConfig

from colossal.errors import ConfigError
from colossal.inference import InferenceConfig, InferenceEngine

CONFIG = GenerationConfig(max_new_tokens=6)
PROMPTS = make_prompts()[:3]


class Letters:
    """A tokenizer: a letter for each token."""

    eos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(each) - 0x4E00 for each in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(0x4E00 + token) for token in tokens)


def text_of(tokens: list[int]) -> str:
    return Letters().decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return build_decoder("llama")


@pytest.fixture
def engine(model: Any) -> InferenceEngine:
    return InferenceEngine(model, Letters(), InferenceConfig(max_input_len=32, max_output_len=32))


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return generate(model, PROMPTS, 6)


def test_texts_of_prompts_and_outputs(engine: InferenceEngine, expected: list[list[int]]) -> None:
    texts = [text_of(prompt + tokens) for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    prompts = [text_of(prompt) for prompt in PROMPTS]
    assert engine.generate(prompts=prompts, generation_config=CONFIG) == texts
    found = engine.generate(prompts=prompts, return_token_ids=True, generation_config=CONFIG)
    assert found == (texts, expected)
    assert engine.generate(prompts=prompts[0], generation_config=CONFIG) == texts[:1]
    assert engine.generate(prompts_token_ids=PROMPTS, generation_config=CONFIG) == texts
    assert engine.generate(prompts=prompts, prompts_token_ids=PROMPTS, generation_config=CONFIG) == texts


@pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda rows: [torch.tensor(row) for row in rows]])
def test_tokens_of_any_kind(engine: InferenceEngine, expected: list[list[int]], kind: Any) -> None:
    text = text_of(PROMPTS[0] + expected[0])
    assert engine.generate(prompts_token_ids=kind([PROMPTS[0]] * 2), generation_config=CONFIG) == [text] * 2


def test_one_list_of_tokens(engine: InferenceEngine, expected: list[list[int]]) -> None:
    found = engine.generate(prompts_token_ids=PROMPTS[0], return_token_ids=True, generation_config=CONFIG)
    assert found == ([text_of(PROMPTS[0] + expected[0])], expected[:1])


def test_results_are_in_the_order_of_their_ids(engine: InferenceEngine, expected: list[list[int]]) -> None:
    engine.add_request(PROMPTS[2], CONFIG, request_id=1)
    _, found = engine.generate(
        request_ids=[7, 3], prompts_token_ids=PROMPTS[:2], return_token_ids=True, generation_config=CONFIG
    )
    assert found == [expected[2], expected[1], expected[0]]
    engine.add_request(PROMPTS[1], CONFIG)
    assert engine.generate(return_token_ids=True) == ([text_of(PROMPTS[1] + expected[1])], [expected[1]])
    assert engine.generate() == []


def test_what_is_refused(engine: InferenceEngine, model: Any) -> None:
    with pytest.raises(ConfigError, match="as many request_ids as prompts. Found 1 for 2"):
        engine.generate(request_ids=7, prompts_token_ids=PROMPTS[:2])
    with pytest.raises(ConfigError, match="as many prompts as prompts. Found 1 for 2"):
        engine.generate(prompts="a", prompts_token_ids=PROMPTS[:2])
    with pytest.raises(ConfigError, match="Found 7, which is in use"):
        engine.generate(request_ids=[7, 7], prompts_token_ids=PROMPTS[:2])
    assert not engine.has_requests
    with pytest.raises(ConfigError, match=r"generate\(prompts, parameters\)"):
        InferenceEngine(model, inference_config=engine.config).generate(prompts_token_ids=PROMPTS)
