"""The small inputs are what `from_pretrained` and programs that fine-tune read."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from colossal.errors import ConfigError
from colossal.testing import make_finetuning_inputs


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_they_load_and_the_tokenizer_gives_back_what_it_was_given(family, tmp_path) -> None:
    model_dir, data = make_finetuning_inputs(tmp_path, family, num_hidden_layers=3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    assert (model.config.model_type, model.config.num_hidden_layers) == (family, 3)
    rows = [json.loads(line)["messages"] for line in data.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 500
    for question, answer in rows[::100]:
        assert (question["role"], answer["role"]) == ("user", "assistant")
        ids = tokenizer.apply_chat_template([question, answer], return_dict=False)
        assert max(ids) < model.config.vocab_size
        assert tokenizer.decode(ids) == f"<user>{question['content']}<end><assistant>{answer['content']}<end>"


@pytest.mark.slow
def test_they_are_the_same_each_time(tmp_path) -> None:
    for name in ("first", "second"):
        make_finetuning_inputs(tmp_path / name)
    for path in ("model/model.safetensors", "model/tokenizer.json", "data.jsonl"):
        assert (tmp_path / "first" / path).read_bytes() == (tmp_path / "second" / path).read_bytes()


def test_an_unknown_family_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="gpt2, llama, qwen3"):
        make_finetuning_inputs(tmp_path, "mamba")
