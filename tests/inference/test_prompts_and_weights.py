"""What programs pass to an engine, and what they do to its model between two calls."""

from typing import Any

import numpy as np
import pytest
import torch
from decoders import VOCABULARY, build_decoder, generate, make_prompts
from engines import SIZES, greedy, tokens_of
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, Phi3Config, Phi3ForCausalLM

from colossal.errors import ConfigError, UnsupportedError
from colossal.inference import InferenceConfig, InferenceEngine


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_decoder("llama")


def make_engine(model: Any, **options: Any) -> InferenceEngine:
    return InferenceEngine(model, inference_config=InferenceConfig(**SIZES | options))


def test_a_padded_batch_is_refused() -> None:
    model, params = build_decoder("llama"), greedy(3)
    model.config.pad_token_id = 0
    engine = make_engine(model)
    for row in ([0, 0, 5, 6], [5, 6, 0, 0]):
        for rows in ([[7, 8, 9, 10], row], torch.tensor([[7, 8, 9, 10], row])):
            with pytest.raises(ConfigError, match=r"some, as number 1, (begin|end) with the padding token 0"):
                engine.generate(rows, params)
    prompts = torch.tensor([[0, 5, 6], [0, 7, 8]])  # all begin with it, which is of the texts then
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=3, do_sample=False)
    assert tokens_of(engine.generate(prompts, params)) == expected[:, 3:].tolist()


def test_tokens_are_integers_of_numpy_and_tensors_too(llama) -> None:
    engine, params = make_engine(llama), greedy(3)
    [expected] = generate(llama, [[5, 6]], 3)
    for prompt in ([np.int64(5), np.int64(6)], [[np.int32(5), np.int32(6)]], list(torch.tensor([5, 6]))):
        assert tokens_of(engine.generate(prompt, params)) == [expected]  # type: ignore[arg-type]
    engine.add_request(torch.tensor([5, 6]), params)  # type: ignore[arg-type]
    *_, last = (engine.step() for _ in range(3))
    assert tokens_of(last) == [expected]
    for wrong, found in ((5, "Found 5"), ([None], "Found None"), ([[True, 5]], "Found True")):
        with pytest.raises(ConfigError, match=found):
            engine.generate(wrong, params)  # type: ignore[arg-type]


def test_end_tokens_of_a_generation_config_take_the_place_of_those_of_the_model() -> None:
    model, prompts = build_decoder("llama"), make_prompts()[:1]
    [tokens] = generate(model, prompts, 16)
    first, second = [token for token in dict.fromkeys(tokens) if tokens.index(token) > 1][:2]
    model.generation_config.eos_token_id = first
    engine = make_engine(model)
    for eos in (second, None):
        config = GenerationConfig(max_new_tokens=16, eos_token_id=eos)
        [expected] = model.generate(torch.tensor(prompts), generation_config=config)[:, len(prompts[0]) :].tolist()
        assert tokens_of(engine.generate(prompts, config)) == [expected]
        assert len(expected) == tokens.index(first if eos is None else second) + 1


@pytest.mark.parametrize("way", ["optimizer", "load_state_dict", "assign", "data"])
def test_weights_that_are_new_compute_prefixes_again(way: str) -> None:
    model, prompts = build_decoder("llama"), [[*range(5, 30)]]
    engine = make_engine(model, block_size=4)
    assert tokens_of(engine.generate(prompts, greedy(8))) == (before := generate(model, prompts, 8))
    state = {name: -value for name, value in model.state_dict().items()}
    if way == "optimizer":
        model.train()(input_ids=torch.tensor(prompts), labels=torch.tensor(prompts)).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        model.eval()
    elif way == "data":
        for name, parameter in model.named_parameters():
            parameter.data = state[name]
    else:
        model.load_state_dict(state, assign=way == "assign")
    assert (expected := generate(model, prompts, 8)) != before
    assert tokens_of(engine.generate(prompts, greedy(8))) == expected
    num_hit = engine.statistics.num_hit_tokens
    engine.generate(prompts, greedy(8))
    assert engine.statistics.num_hit_tokens > num_hit, "they are kept while weights are the same"


def test_adapters_that_are_switched_compute_prefixes_again() -> None:
    model, prompts = build_decoder("llama"), [[*range(5, 30)]]
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: Any = get_peft_model(model, config)
    adapted.add_adapter("second", config)
    engine = make_engine(adapted.double().eval(), block_size=4)
    found = []
    for name in ("default", "second", "default"):
        adapted.set_adapter(name)
        found.append(tokens_of(engine.generate(prompts, greedy(8))))
        assert found[-1] == generate(adapted, prompts, 8)
    assert found[0] != found[1]
    with adapted.disable_adapter():
        assert tokens_of(engine.generate(prompts, greedy(8))) == generate(adapted, prompts, 8)


def test_longrope_is_refused_where_lengths_of_a_batch_would_change_tokens() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 128, "original_max_position_embeddings": 32}
    config = Phi3Config(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=1, rope_parameters=rope, **sizes)
    model = Phi3ForCausalLM(config).eval()
    with pytest.raises(UnsupportedError, match="sequences of up to 32 tokens .* together 64. Lower one of them"):
        make_engine(model)
    assert InferenceEngine(model).config.max_length == 32
