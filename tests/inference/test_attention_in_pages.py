"""Attention reads pages where it can, gathers where it must, and leaves models as they were."""

from typing import Any
from unittest import mock

import pytest
import torch
from decoders import build_decoder, generate, make_prompts
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from colossal._src.inference import attention_in_pages
from colossal._src.kernel import paged_attention
from colossal.inference import InferenceConfig, InferenceEngine, SamplingParams

NUM_LAYERS, NUM_TOKENS = 2, 16


def tokens_and_calls(model: Any, **options: Any) -> tuple[list[list[int]], int]:
    """Generate for all prompts, and count how often attention read pages."""
    engine = InferenceEngine(model, None, InferenceConfig(max_input_len=32, max_output_len=32, **options))
    with mock.patch.object(attention_in_pages, "paged_attention", wraps=paged_attention) as counted:
        outputs = engine.generate(make_prompts(), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    return [list(output.outputs[0].token_ids) for output in outputs], counted.call_count


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
def test_new_tokens_attend_to_pages(name: str) -> None:
    model = build_decoder(name)
    tokens, num_calls = tokens_and_calls(model)
    assert tokens == generate(model, make_prompts(), NUM_TOKENS)
    assert num_calls == NUM_LAYERS * (NUM_TOKENS - 1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bloom", {}),  # adds a bias to the scores
        ("falcon-rope", {}),  # calls no function by its name
        ("deepseek", {}),  # makes keys out of what was cached
        ("llama", {"batch_invariant": True}),
    ],
)
def test_other_attention_gets_gathered_tokens(name: str, options: dict[str, Any]) -> None:
    model = build_decoder(name)
    tokens, num_calls = tokens_and_calls(model, **options)
    assert tokens == generate(model, make_prompts(), NUM_TOKENS)
    assert num_calls == 0


def test_without_own_code_all_tokens_are_gathered() -> None:
    model = build_decoder("mistral-window")
    with mock.patch.object(attention_in_pages, "has_paged_attention", return_value=False):
        tokens, num_calls = tokens_and_calls(model)
    assert tokens == generate(model, make_prompts(), NUM_TOKENS)
    assert num_calls == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_that_leaves_other_dtypes_gathers(dtype: torch.dtype) -> None:
    model = build_decoder("qwen3").float()  # whose norms of queries and keys are not those of values
    with torch.autocast("cpu", dtype):
        tokens, num_calls = tokens_and_calls(model)
        with mock.patch.object(attention_in_pages, "has_paged_attention", return_value=False):
            expected, _ = tokens_and_calls(model)
    assert tokens == expected
    assert num_calls == 0


def test_a_mask_of_another_kind_is_made() -> None:
    plain, window = causal_mask_function, sliding_window_causal_mask_function(4)
    hides = attention_in_pages._hides_only_what_pages_leave_out
    assert hides(plain)
    assert hides(window)
    assert not hides(and_masks(plain, lambda _batch, _head, query, key: key < query))
    assert not hides(or_masks(plain, sliding_window_overlay(4)))
    assert not hides(chunked_causal_mask_function(4, torch.zeros(1)))
    assert not hides(None)


def test_a_model_keeps_its_attention_after_an_exception() -> None:
    model = build_decoder("llama")
    engine = InferenceEngine(model, None, InferenceConfig(max_input_len=32, max_output_len=32))
    with (
        mock.patch.object(attention_in_pages, "paged_attention", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        engine.generate(make_prompts())
    assert model.config._attn_implementation == "sdpa"
    generate(model, make_prompts()[:1], 2)
