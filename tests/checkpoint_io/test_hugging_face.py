"""A directory that save_model wrote is one that transformers loads, and the other way round."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossal.checkpoint_io import CheckpointIndexFile, CheckpointIO
from colossal.errors import CheckpointError

transformers = pytest.importorskip("transformers")

IO = CheckpointIO()
IDS = torch.arange(8).reshape(1, 8)


def gpt2(seed: int = 0, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids, **overrides)).eval()


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_loads_what_was_saved(tmp_path: Path, safe: bool, tied: bool) -> None:
    model = gpt2(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    IO.save_model(model, tmp_path, shard=True, use_safetensors=safe, size_per_shard=1 / 64)
    assert len(list(tmp_path.glob("*-of-*"))) > 2
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(loaded.eval()(IDS).logits, model(IDS).logits)
    assert loaded.config.architectures == ["GPT2LMHeadModel"]
    assert loaded.generation_config.eos_token_id == 2
    assert torch.equal(IO.load_model(gpt2(1, tie_word_embeddings=tied), tmp_path)(IDS).logits, model(IDS).logits)


def test_saving_does_not_touch_the_configuration(tmp_path: Path) -> None:
    model = gpt2().bfloat16()
    before = model.config.to_dict()
    IO.save_model(model, tmp_path, shard=True)
    assert model.config.to_dict() == before
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16


def test_a_configuration_that_cannot_be_saved_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    model = gpt2()
    model.generation_config.max_new_tokens = -1
    with pytest.raises(CheckpointError, match="GenerationConfig cannot be saved"):
        IO.save_model(model, tmp_path, shard=True)
    assert not list(tmp_path.iterdir())


def test_what_transformers_saved_loads(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size=10000)
    for folder in ("one", "many"):
        assert torch.equal(IO.load_model(gpt2(1), tmp_path / folder)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("safe", [False, True])
def test_a_model_around_a_tied_one_comes_back(tmp_path: Path, safe: bool) -> None:
    saved, fresh = nn.ModuleDict({"lm": gpt2()}), nn.ModuleDict({"lm": gpt2(1)})
    IO.save_model(saved, tmp_path / "model", use_safetensors=safe)
    IO.load_model(fresh, tmp_path / "model")
    assert torch.equal(fresh["lm"](IDS).logits, saved["lm"](IDS).logits)


def test_distributed_checkpoint_of_torch_reads_what_was_saved(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    model, fresh = gpt2(), gpt2(1)
    IO.save_model(model, tmp_path, shard=True, use_safetensors=True, size_per_shard=1 / 64)
    names = CheckpointIndexFile.from_file(tmp_path / "model.safetensors.index.json").get_all_param_names()
    state = {name: fresh.state_dict()[name] for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process, which saves and loads alone
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert torch.equal(fresh(IDS).logits, model(IDS).logits)
