"""Distributions are those of transformers, random numbers those of the request, and parameters are checked."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from colossal._src.inference.requests import Sequence
from colossal._src.inference.sampling import Sampler, candidates, most_probable, penalize
from colossal.errors import ConfigError, UnsupportedError
from colossal.inference import SamplingParams

VOCABULARY = 50


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3


def sequence_of(**params: Any) -> Sequence:
    return Sequence((1, 2, 3), SamplingParams(**params), 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_of_the_highest_logits_is_the_most_probable(dtype: torch.dtype) -> None:
    logits = logits_of(6).to(dtype)
    logits[1] = 0.0
    logits[2, [7, 31]] = 100.0
    logits[3, 40] = torch.inf
    logits[4, :] = -torch.inf
    logits[5, [3, 9]] = torch.nan
    assert torch.equal(most_probable(logits), logits.argmax(-1))
    assert most_probable(logits).tolist()[1:] == [0, 7, 40, 0, 3]
    assert torch.equal(most_probable(logits.T), logits.argmax(0))


WARPED = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top-k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "top-p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "smallest top-p": ({"top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
    "min-p": ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "all": (
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        [TemperatureLogitsWarper(2.0), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
    ),
}


@pytest.mark.parametrize("case", WARPED)
def test_distributions_are_those_of_transformers(case: str) -> None:
    params, warpers = WARPED[case]
    logits = logits_of(4)
    ids: Any = torch.zeros(4, 1, dtype=torch.long)
    expected = LogitsProcessorList(warpers)(ids, logits.clone()).softmax(-1)
    # two rows ask for nothing: what the others ask for does not reach them
    rows = [SamplingParams(**params), SamplingParams(), SamplingParams(**params), SamplingParams()]
    expected[1::2] = logits[1::2].softmax(-1)
    probabilities, order = candidates(logits, rows)
    found = torch.zeros_like(logits).scatter(-1, order, probabilities / probabilities.sum(-1, keepdim=True))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_penalties() -> None:
    logits = logits_of(3)
    sequences = [sequence_of(), sequence_of(repetition_penalty=1.3), sequence_of()]
    sequences[2].params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    for sequence in sequences:
        sequence.outputs = [7, 9, 7]
    before = logits.clone()
    found = penalize(logits, sequences)
    torch.testing.assert_close(logits, before, rtol=0, atol=0)
    ids: Any = torch.tensor([[1, 2, 3, 7, 9, 7]])
    repeated = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[1:2].clone())
    torch.testing.assert_close(found[1:2], repeated)
    expected = logits[2].clone()
    expected[7] -= 0.5 + 2 * 0.25
    expected[9] -= 0.5 + 0.25
    torch.testing.assert_close(found[2], expected)
    torch.testing.assert_close(found[0], logits[0], rtol=0, atol=0)


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    sampler, sequence = Sampler(), sequence_of(top_k=3, seed=0)
    logits = logits_of(1)
    draws = [sampler.sample({sequence: logits[0]})[sequence].token_id for _ in range(2000)]
    probabilities, order = candidates(logits, [sequence.params])
    for token, probability in zip(order[0, :3].tolist(), probabilities[0, :3].tolist(), strict=True):
        assert draws.count(token) / 2000 == pytest.approx(probability, abs=0.04)
    assert set(draws) == set(order[0, :3].tolist())


def test_a_row_does_not_see_the_others() -> None:
    logits = logits_of(8).float()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "top_p": 0.5},
        {"seed": 3, "min_p": 0.1},
    ]
    sequences = [sequence_of(logprobs=2, **kinds[index % 3]) for index in range(8)]
    together = Sampler().sample(dict(zip(sequences, logits, strict=True)))
    for sequence, row in zip(sequences, logits, strict=True):
        assert Sampler().sample({sequence: row})[sequence] == together[sequence]


def test_seeds() -> None:
    logits = torch.zeros(VOCABULARY)

    def draw(sequence: Sequence) -> list[int]:
        sampler = Sampler()
        return [sampler.sample({sequence: logits})[sequence].token_id for _ in range(8)]

    second = sequence_of(seed=1)
    second.index = 1
    assert draw(sequence_of(seed=1)) == draw(sequence_of(seed=1))
    assert len({tuple(draw(each)) for each in (sequence_of(seed=1), sequence_of(seed=2), second, sequence_of())}) == 4


def test_logprobs_are_those_of_the_model() -> None:
    [row] = logits_of(1)
    sequence = sequence_of(temperature=0.0, presence_penalty=2.0, logprobs=3)
    found = Sampler().sample({sequence: row})[sequence].logprob
    expected = row.log_softmax(-1)
    assert found is not None
    assert found.logprob == expected[found.token_id].item()
    assert found.top == {int(token): expected[token].item() for token in expected.topk(3).indices}


@pytest.mark.parametrize(
    ("name", "value", "required"),
    [
        ("temperature", -1.0, "at least 0"),
        ("temperature", float("nan"), "at least 0"),
        ("top_k", 1.5, "an integer of at least 0"),
        ("top_p", 0.0, "above 0, and at most 1"),
        ("min_p", 2, "from 0 to 1"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", float("inf"), "a number"),
        ("frequency_penalty", "1", "a number"),
        ("seed", 1.0, "an integer or None"),
        ("logprobs", -1, "an integer of at least 0"),
        ("n", 0, "an integer of at least 1"),
        ("n", True, "an integer of at least 1"),
        ("stop", [""], "strings that are not empty"),
        ("stop_token_ids", ["a"], "integers of at least 0"),
        ("max_tokens", 0, "an integer of at least 1"),
        ("ignore_eos", 1, "True or False"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any, required: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of SamplingParams is .*{required}.* Found ") as error:
        SamplingParams(**{name: value})
    assert repr(tuple(value) if isinstance(value, list) else value) in str(error.value)


def test_reads_a_generation_config() -> None:
    greedy = SamplingParams.from_generation_config(GenerationConfig(max_new_tokens=4, eos_token_id=5, top_k=3))
    assert greedy == SamplingParams(temperature=0.0, max_tokens=4, stop_token_ids=[5], ignore_eos=True)
    sampled = GenerationConfig(do_sample=True, temperature=0.5, min_p=0.1, num_return_sequences=2, stop_strings=["a"])
    expected = SamplingParams(temperature=0.5, top_k=50, min_p=0.1, n=2, stop="a")
    assert SamplingParams.from_generation_config(sampled) == expected
    with pytest.raises(UnsupportedError, match="Found num_beams=4"):
        SamplingParams.from_generation_config(GenerationConfig(num_beams=4))


def test_max_length_of_a_generation_config_counts_the_prompt() -> None:
    config = GenerationConfig(max_length=8)
    assert SamplingParams.from_generation_config(config, prompt_length=5).max_tokens == 3
    for length in (None, 8):
        with pytest.raises(ConfigError, match="Found max_length=8 and .* of the prompt. Pass max_new_tokens"):
            SamplingParams.from_generation_config(config, prompt_length=length)


@pytest.mark.parametrize(
    "option",
    [
        {"min_new_tokens": 2},
        {"min_length": 2},
        {"bad_words_ids": [[5]]},
        {"suppress_tokens": [5]},
        {"begin_suppress_tokens": [5]},
        {"forced_eos_token_id": 5},
        {"encoder_repetition_penalty": 1.5},
        {"sequence_bias": [[[5], -1.0]]},
        {"exponential_decay_length_penalty": (2, 1.5)},
        {"guidance_scale": 2.0},
        {"max_time": 1.0},
        {"output_scores": True, "return_dict_in_generate": True},
        {"epsilon_cutoff": 0.1, "do_sample": True},
    ],
    ids=str,
)
def test_what_a_generation_config_asks_for_is_done_or_refused(option: dict[str, Any]) -> None:
    name = next(iter(option))
    with pytest.raises(UnsupportedError, match=f"Found {name}=.* Leave {name} out, or call generate of the model"):
        SamplingParams.from_generation_config(GenerationConfig(**option))


def test_numbers_of_numpy_and_of_tensors_are_numbers() -> None:
    found = SamplingParams(seed=np.int64(5), temperature=np.float64(0.5), top_k=torch.tensor(3), stop_token_ids=5)  # type: ignore[arg-type]
    assert found == SamplingParams(seed=5, temperature=0.5, top_k=3, stop_token_ids=[5])
    assert (type(found.seed), type(found.top_k)) == (int, int)


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-6])
def test_the_lowest_temperatures_take_the_most_probable_token(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    for dtype in (torch.float32, torch.float64):
        probabilities, order = candidates(torch.tensor([[1.0, 90.0, -3.0]], dtype=dtype), [params])
        assert (probabilities.tolist(), order[0, 0].item()) == ([[1, 0, 0]], 1)
