"""Outputs equal those of `generate`, whatever is computed together, and end where they should."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoders import DECODERS, MORE_DECODERS, VOCABULARY, build_decoder, generate, make_prompts
from engines import SIZES, TIGHT, greedy, tokens_of
from transformers import (
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from colossal.errors import ConfigError, UnsupportedError
from colossal.inference import InferenceConfig, InferenceEngine, SamplingParams


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_decoder("llama")


def make_engine(model: Any, tokenizer: Any = None, **options: Any) -> InferenceEngine:
    return InferenceEngine(model, tokenizer, InferenceConfig(**SIZES | options))


def check_integrity(engine: InferenceEngine) -> None:
    engine._core.scheduler.check_integrity()


# ------------------------------------------------------------------------------------------ equal to `generate`


def check_equal(name: str, **options: Any) -> InferenceEngine:
    model, prompts = build_decoder(name), make_prompts()
    expected = generate(model, prompts, 16)
    assert len({token for tokens in expected for token in tokens}) >= 20, "outputs repeat themselves and show little"
    engine = make_engine(model, **options)
    assert tokens_of(engine.generate(prompts, greedy(16))) == expected
    check_integrity(engine)
    assert engine.statistics.num_used_pages == 0
    return engine


@pytest.mark.parametrize("name", [*DECODERS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_DECODERS)])
def test_equal_to_generate_in_chunks_with_prefixes_and_preempted(name: str) -> None:
    statistics = check_equal(name, **TIGHT).statistics
    assert statistics.num_preempted > 0
    assert statistics.num_hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS | MORE_DECODERS)
@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, TIGHT | {"batch_invariant": True}], ids=str)
def test_equal_to_generate(name: str, options: dict[str, Any]) -> None:
    check_equal(name, **options)


def test_a_prompt_of_one_token_continues_nothing_of_the_sequence_before_it(llama) -> None:
    prompts = [[9, 8, 7], [6], [5]]
    engine = make_engine(llama)
    assert [tokens_of(engine.generate([prompt], greedy(8)))[0] for prompt in prompts] == generate(llama, prompts, 8)


def test_requests_that_come_and_go(llama) -> None:
    prompts, numbers = make_prompts(), random.Random(0)  # noqa: S311
    expected = generate(llama, prompts, 12)
    engine = make_engine(llama, **TIGHT)
    running: dict[int | str, int] = {}
    finished = 0
    for turn in range(120):
        if turn < 80 and numbers.random() < 0.4:
            index = numbers.randrange(len(prompts))
            running[engine.add_request(prompts[index], greedy(12))] = index
        if running and numbers.random() < 0.1:
            request_id = numbers.choice(list(running))
            output = engine.abort(request_id)
            assert output is not None
            assert output.outputs[0].finish_reason == "abort"
            del running[request_id]
            assert engine.abort(request_id) is None
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            assert tokens == expected[running[output.request_id]][: len(tokens)]
            if output.is_finished:
                del running[output.request_id]
                finished += 1
        check_integrity(engine)
    assert not running
    assert not engine.has_requests
    assert finished >= 10
    assert engine.statistics.num_used_pages == 0


def test_a_prefix_is_computed_once(llama) -> None:
    engine = make_engine(llama, block_size=4)
    [_, prompt, *_] = make_prompts()
    engine.generate([prompt], greedy(1))
    assert engine.statistics.num_hit_tokens == 0
    engine.generate([prompt], greedy(1))
    assert engine.statistics.num_hit_tokens == (len(prompt) - 1) // 4 * 4
    engine.reset_prefix_cache()
    engine.generate([prompt], greedy(1))
    assert engine.statistics.num_hit_tokens == (len(prompt) - 1) // 4 * 4
    engine.add_request(prompt)
    engine.step()
    with pytest.raises(ConfigError, match="Found 1 that do"):
        engine.reset_prefix_cache()


def test_several_outputs_share_the_prompt(llama) -> None:
    engine = make_engine(llama, block_size=4)
    [_, prompt, *_] = make_prompts()
    [output] = engine.generate([prompt], SamplingParams(n=3, seed=1, max_tokens=6))
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert len({each.token_ids for each in output.outputs}) == 3
    assert engine.statistics.num_hit_tokens == 2 * ((len(prompt) - 1) // 4 * 4)
    [again] = make_engine(llama).generate([prompt], SamplingParams(n=3, seed=1, max_tokens=6))
    assert again.outputs == output.outputs


# ------------------------------------------------------------------------------------------ the batch


def test_seeds_give_the_same_tokens_in_any_batch(llama) -> None:
    prompts = make_prompts()
    params = [SamplingParams(seed=index, top_p=0.9, max_tokens=10) for index in range(len(prompts))]
    together = tokens_of(make_engine(llama, **TIGHT).generate(prompts, params))
    alone = make_engine(llama)
    pairs = zip(prompts, params, strict=True)
    assert [tokens_of(alone.generate([prompt], each))[0] for prompt, each in pairs] == together


@pytest.mark.parametrize("mixtures", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_batch_invariant_is_equal_bit_by_bit(mixtures: int) -> None:
    model = build_decoder("llama").float()
    prompts, numbers = make_prompts(), random.Random(0)  # noqa: S311
    params = [SamplingParams(seed=index, logprobs=2, max_tokens=6) for index in range(len(prompts))]
    config = TIGHT | {"batch_invariant": True}
    alone = [
        make_engine(model, **config).generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)
    ]
    engine = make_engine(model, **config)  # goes on with pages that earlier mixtures left
    for _ in range(mixtures):
        order = numbers.sample(range(len(prompts)), numbers.randint(2, len(prompts)))
        outputs = engine.generate([prompts[index] for index in order], [params[index] for index in order])
        for index, output in zip(order, outputs, strict=True):
            assert output.outputs == alone[index].outputs
    assert engine.statistics.num_preempted > 0
    assert engine.statistics.num_hit_tokens > 0


# ------------------------------------------------------------------------------------------ ends


class Letters:
    """A tokenizer: a letter for each token."""

    eos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(each) - 0x4E00 for each in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(0x4E00 + token) for token in tokens)


def test_an_output_ends_at_the_end_token_of_the_model_also_if_the_generation_config_has_none() -> None:
    model, prompt = build_decoder("llama"), make_prompts()[1]
    [tokens] = generate(model, [prompt], 12)
    end = tokens[5]
    model.config.eos_token_id = end
    expected = tokens[: tokens.index(end) + 1]
    unaware = GenerationConfig(max_new_tokens=12)
    [output] = make_engine(model).generate(prompt, unaware)
    assert (list(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (expected, "stop")
    [output] = make_engine(model).generate(prompt, greedy(12, ignore_eos=True))
    assert (list(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (tokens, "length")


def test_stop_tokens_and_stop_strings(llama) -> None:
    prompt = make_prompts()[1]
    [tokens] = generate(llama, [prompt], 12)
    letters = Letters().decode(tokens, skip_special_tokens=True)
    engine = make_engine(llama, Letters())
    [output] = engine.generate([prompt], greedy(12, stop_token_ids=[tokens[4]]))
    assert list(output.outputs[0].token_ids) == tokens[: tokens.index(tokens[4]) + 1]
    [output] = engine.generate(Letters().decode(prompt, skip_special_tokens=True), greedy(12, stop=letters[3:5]))
    [found] = output.outputs
    assert output.prompt_token_ids == tuple(prompt)
    assert (found.text, found.finish_reason) == (letters[: letters.index(letters[3:5])], "stop")


def test_a_stream_keeps_back_what_may_be_a_stop_string(llama) -> None:
    prompt = make_prompts()[1]
    letters = Letters().decode(generate(llama, [prompt], 6)[0], skip_special_tokens=True)
    engine = make_engine(llama, Letters())
    engine.add_request(prompt, greedy(6, stop=f"{letters[2:4]}!"), request_id="stream")
    texts: list[str] = []
    while engine.has_requests:
        texts += [output.outputs[0].text for output in engine.step() if output.request_id == "stream"]
    lengths = [1, 2, 2, 2, 5, 6]
    assert texts == [letters[:length] for length in lengths]


def test_a_character_of_several_tokens_comes_when_it_is_complete(llama) -> None:
    def decode(tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(b for token in tokens for b in ("é".encode()[token % 2],)).decode(errors="replace")

    engine = make_engine(llama, SimpleNamespace(decode=decode, eos_token_id=None))
    engine.add_request([5, 6], greedy(4))
    request = engine._core.requests.get(0)
    assert request is not None
    stream = next(iter(request.sequences.values()))
    texts: list[str] = []
    for token in (0, 1, 0):
        stream.add(token)
        texts.append(stream.text)
    assert [*texts, stream.finish()] == ["", "é", "é", "é�"]


# ------------------------------------------------------------------------------------------ refused


def test_models_that_are_refused(llama) -> None:
    mamba: Any = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)).eval()
    with pytest.raises(UnsupportedError, match="recurrent state for each sequence"):
        make_engine(mamba)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedError, match="attends to the output of an encoder"):
        make_engine(t5.eval())
    config = OpenAIGPTConfig(vocab_size=8, n_positions=64, n_embd=8, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedError, match="whose forward takes no past_key_values. Call its generate"):
        make_engine(OpenAIGPTLMHeadModel(config).eval())
    with pytest.raises(UnsupportedError, match="no head that returns logits"):
        make_engine(llama.model)
    with pytest.raises(ConfigError, match="has 128 positions"):
        make_engine(llama, max_input_len=100)
    with pytest.raises(ConfigError, match=r"Found dtype=torch\.float32 for parameters in torch\.float64"):
        make_engine(llama, dtype=torch.float32)


def test_a_configuration_of_another_type_or_in_another_place_is_refused(llama) -> None:
    with pytest.raises(ConfigError, match=r"Found inference_config=\{'max_batch_size': 2\}"):
        InferenceEngine(llama, None, {"max_batch_size": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Found tokenizer=InferenceConfig"):
        InferenceEngine(llama, InferenceConfig(**SIZES))


def test_prompts_are_tensors_too_and_other_objects_are_refused(llama) -> None:
    engine, params = make_engine(llama), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    expected = engine.generate([[5, 6], [7, 8]], params)
    found = [*engine.generate(torch.tensor([[5, 6]]), params), *engine.generate([torch.tensor([7, 8])], params)]
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    with pytest.raises(ConfigError, match=r"Found a dict with input_ids, attention_mask. Pass what is under input_ids"):
        engine.generate({"input_ids": [[5, 6]], "attention_mask": [[1, 1]]}, params)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Found \{'max_tokens': 2\}. Write SamplingParams"):
        engine.generate([[5, 6]], {"max_tokens": 2})


def test_a_dtype_has_a_name() -> None:
    names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert {name: InferenceConfig(dtype=name).dtype for name in names} == names  # type: ignore[arg-type]


def test_without_a_configuration_lengths_are_those_that_the_model_has(llama) -> None:
    engine = InferenceEngine(llama)
    assert (engine.config.max_input_len, engine.config.max_output_len) == (64, 64)
    assert len(engine.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_a_model_in_training_mode_is_refused() -> None:
    model = build_decoder("llama")
    with pytest.raises(ConfigError, match=r"Call model\.eval\(\)"):
        make_engine(model.train())
    engine = make_engine(model.eval())
    engine.add_request([1])
    model.train()
    with pytest.raises(ConfigError, match=r"Call model\.eval\(\)"):
        engine.step()


def test_requests_that_are_refused(llama) -> None:
    engine = make_engine(llama)
    for prompt, found in (
        ([], "Found 0"),
        ([5] * 33, "Found 33"),
        ([VOCABULARY], f"Found {VOCABULARY}"),
        ("a", "a text"),
    ):
        with pytest.raises(ConfigError, match=found):
            engine.generate([prompt])
    with pytest.raises(ConfigError, match="at most max_output_len=32. Found 33"):
        engine.add_request([5], greedy(33))
    with pytest.raises(ConfigError, match="without a tokenizer"):
        engine.add_request([5], greedy(3, stop="a"))
    with pytest.raises(ConfigError, match="Found 3 for 2 prompts"):
        engine.generate([[5], [6]], [greedy(1)] * 3)
    engine.add_request([5], request_id="a")
    with pytest.raises(ConfigError, match="Found 'a', which is in use"):
        engine.add_request([5], request_id="a")
    with pytest.raises(ConfigError, match="Found 1 requests that were added before"):
        engine.generate([5])


def test_an_exception_in_generate_leaves_no_pages_behind(llama, monkeypatch) -> None:
    engine, prompts = make_engine(llama, **TIGHT), make_prompts()
    with monkeypatch.context() as patch:
        patch.setattr(llama.lm_head, "forward", lambda _hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompts)
    assert not engine.has_requests
    assert engine.statistics.num_used_pages == 0
    check_integrity(engine)
    assert tokens_of(engine.generate(prompts, greedy(8))) == generate(llama, prompts, 8)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"max_batch_size": 0}, "max_batch_size of InferenceConfig is an integer of at least 1. Found 0"),
        ({"num_blocks": 1.5}, "num_blocks of InferenceConfig is an integer"),
        ({"output_reserve": 2}, "output_reserve of InferenceConfig is a number from 0 to 1"),
        ({"prefix_cache": 1}, "prefix_cache of InferenceConfig is True or False"),
        (
            {"dtype": "float16"},
            "dtype of InferenceConfig is a torch.dtype, its name among 'fp32', 'fp16' and 'bf16', or None",
        ),
        ({"max_tokens_per_step": 7}, "Found max_tokens_per_step=7 and max_batch_size=8"),
        ({"num_blocks": 3}, "num_blocks is at least 4. Found num_blocks=3"),
        ({"pp_size": 0}, "pp_size of InferenceConfig is an integer of at least 1. Found 0"),
    ],
)
def test_a_wrong_configuration_is_named(options: dict[str, Any], found: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=found):
        InferenceConfig(**SIZES | options)


@pytest.mark.slow
def test_a_model_is_loaded_from_a_folder(tmp_path) -> None:
    model = build_decoder("llama").float()
    model.save_pretrained(tmp_path)
    prompts = make_prompts()
    engine = InferenceEngine(tmp_path, inference_config=InferenceConfig(dtype=torch.float64, **SIZES))
    assert engine.tokenizer is None
    assert tokens_of(engine.generate(prompts, greedy(4))) == generate(model.double(), prompts, 4)
