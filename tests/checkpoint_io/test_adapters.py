"""A checkpoint with adapters: the base model for transformers, the adapters for peft, both for load_model."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from colossal._src.checkpoint_io import CheckpointManager, adapter_files
from colossal._src.interface import AdapterNames, model_without_adapters
from colossal.checkpoint_io import CheckpointIndexFile, CheckpointIO
from colossal.errors import CheckpointError

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # of peft
    pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias:UserWarning"),
]

IO = CheckpointIO()
IDS = torch.arange(8).reshape(1, 8)
LORA: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"bias": "all"},
    "whole head": {"modules_to_save": ["lm_head"]},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["c_attn", "wpe"]},
    "tokens": {"trainable_token_indices": {"transformer.wte": [1, 5]}},
}


def gpt2(seed: int = 0, tied: bool = False) -> Any:
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids)).eval()


def adapted(seed: int = 0, name: str = "default", tied: bool = False, **options: Any) -> Any:
    """Return a model whose adapters, and all else that is trained, have values of the seed."""
    settings = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True} | options
    model: Any = peft.get_peft_model(gpt2(seed, tied), peft.LoraConfig(**settings), adapter_name=name).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("options", LORA)
def test_a_directory_is_the_base_model_for_transformers_and_the_adapters_for_peft(
    tmp_path: Path, safe: bool, options: str
) -> None:
    model = adapted(**LORA[options])
    IO.save_model(model, tmp_path, shard=True, use_safetensors=safe, size_per_shard=1 / 64)
    base, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(base) is transformers.GPT2LMHeadModel
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with model.disable_adapter():
        assert torch.equal(logits(base), logits(model))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits(theirs), logits(model))
    fresh = adapted(1, **LORA[options])
    assert not torch.equal(logits(fresh), logits(model))
    IO.load_model(fresh, tmp_path)
    assert_same(fresh, model)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    state = found.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize("options", LORA)
def test_one_file_holds_both_under_names_that_load(tmp_path: Path, name: str, options: str) -> None:
    model = adapted(**LORA[options])
    IO.save_model(model, tmp_path / name)
    assert_same(IO.load_model(adapted(1, **LORA[options]), tmp_path / name), model)
    base = gpt2(1)
    with pytest.raises(CheckpointError, match=r"unexpected in the file: base_model\.model\..*strict=False"):
        IO.load_model(base, tmp_path / name)
    IO.load_model(base, tmp_path / name, strict=False)
    with model.disable_adapter():
        assert torch.equal(logits(base), logits(model))
    state = load_file(tmp_path / name) if name.endswith("s") else torch.load(tmp_path / name, weights_only=True)
    assert set(base.state_dict()) <= set(state)
    assert not any("base_layer" in each for each in state if options != "biases")


@pytest.mark.parametrize("safe", [True, False])
def test_tied_weights_and_an_adapter_of_another_name(tmp_path: Path, safe: bool) -> None:
    model = adapted(name="mine", tied=True)
    IO.save_model(model, tmp_path, shard=True, use_safetensors=safe, prefix="best", size_per_shard=1 / 64)
    assert (tmp_path / "best.adapter" / "adapter_config.json").is_file()
    assert_same(IO.load_model(adapted(1, "mine", tied=True), tmp_path), model)
    assert torch.equal(logits(IO.load_model(adapted(1, tied=True), tmp_path)), logits(model)), "the name is local"
    theirs = peft.PeftModel.from_pretrained(gpt2(tied=True), tmp_path / "best.adapter")
    assert torch.equal(logits(theirs), logits(model))


def test_the_base_inside_of_adapters_is_saved_as_the_whole_is(tmp_path: Path) -> None:
    model = adapted()
    IO.save_model(model_without_adapters(model), tmp_path, shard=True, use_safetensors=True)
    base, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter")), logits(model))
    fresh = adapted(1)
    IO.load_model(model_without_adapters(fresh), tmp_path)
    assert_same(fresh, model)


def test_further_adapters_come_back_too(tmp_path: Path) -> None:
    def two(seed: int) -> Any:
        model = adapted(seed)
        model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["c_proj"], fan_in_fan_out=True))
        for name, parameter in model.named_parameters():
            if "second" in name:
                nn.init.normal_(parameter)
        return model

    model = two(0)
    IO.save_model(model, tmp_path, shard=True, use_safetensors=True)
    assert_same(IO.load_model(two(1), tmp_path), model)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(gpt2(), tmp_path / "adapter")), logits(model))


@pytest.mark.parametrize("safe", [True, False])
def test_an_old_checkpoint_with_the_names_of_the_peft_model_loads(tmp_path: Path, safe: bool) -> None:
    for options in LORA.values():
        model = adapted(**options)
        holder = nn.Module()  # a plain module with those names, saved as it is
        for name, value in model.state_dict().items():
            node: Any = holder
            *path, leaf = name.split(".")
            for part in path:
                node.add_module(part, getattr(node, part, nn.Module()))
                node = getattr(node, part)
            node.register_buffer(leaf, value.clone())
        IO.save_model(holder, tmp_path, shard=True, use_safetensors=safe)
        index = CheckpointIndexFile.from_file(next(tmp_path.glob("*.index.json")))
        assert set(index.get_all_param_names()) == set(model.state_dict())
        assert_same(IO.load_model(adapted(1, **options), tmp_path), model)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_saving_again_replaces_the_adapters_in_either_format_or_removes_them(tmp_path: Path) -> None:
    for seed, safe in enumerate((True, True, False, False, True)):
        model = adapted(seed)
        IO.save_model(model, tmp_path, shard=True, use_safetensors=safe)
        weights = "adapter_model.safetensors" if safe else "adapter_model.bin"
        assert files(tmp_path / "adapter") == ["adapter_config.json", weights]
        assert torch.equal(logits(IO.load_model(adapted(9), tmp_path)), logits(model))
    (tmp_path / "adapter" / "notes.txt").write_text("mine")
    IO.save_model(gpt2(3), tmp_path, shard=True, use_safetensors=True)
    assert files(tmp_path / "adapter") == ["notes.txt"]
    (tmp_path / "adapter" / "notes.txt").unlink()
    IO.save_model(adapted(), tmp_path, shard=True)
    IO.save_model(gpt2(3), tmp_path, shard=True)
    assert not (tmp_path / "adapter").exists()
    assert torch.equal(logits(IO.load_model(gpt2(4), tmp_path)), logits(gpt2(3)))


def stop(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before the index", "after the index"])
@pytest.mark.parametrize("safe", [True, False])
def test_stopped_in_between_a_save_leaves_one_checkpoint(
    tmp_path: Path, safe: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = adapted(0), adapted(1)
    IO.save_model(first, tmp_path, shard=True, use_safetensors=safe)
    step = "stage_config" if when == "before the index" else "publish"
    with monkeypatch.context() as patch:
        patch.setattr(adapter_files.AdapterFiles, step, stop)
        with pytest.raises(KeyboardInterrupt):
            IO.save_model(second, tmp_path, shard=True, use_safetensors=safe)
    expected = first if when == "before the index" else second
    assert_same(IO.load_model(adapted(2), tmp_path), expected)
    IO.save_model(first, tmp_path, shard=True, use_safetensors=safe)
    assert len(files(tmp_path / "adapter")) == 2
    assert_same(IO.load_model(adapted(2), tmp_path), first)


def test_a_save_in_the_background_and_states_of_steps(tmp_path: Path) -> None:
    model = adapted()
    IO.save_model(model, tmp_path / "async", shard=True, use_safetensors=True, use_async=True)
    expected = logits(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert torch.equal(logits(IO.load_model(adapted(1), tmp_path / "async")), expected)
    CheckpointManager(tmp_path / "steps", IO).save(model, optimizer, None, step=1, keep=1)
    fresh = adapted(1)
    again = torch.optim.AdamW([each for each in fresh.parameters() if each.requires_grad])
    assert CheckpointManager(tmp_path / "steps", IO).load(fresh, again, None) == 1
    assert_same(fresh, model)


def cut_off(folder: Path) -> None:
    file = folder / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def of_another_save(folder: Path) -> None:
    IO.save_model(adapted(5), folder / "other", shard=True, use_safetensors=True)
    shutil.copy(folder / "other" / "adapter" / "adapter_model.safetensors", folder / "adapter")


def outside(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("adapter/adapter_model", "../adapter_model"))


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (cut_off, "adapter_model.safetensors"),
    "gone": (lambda folder: shutil.rmtree(folder / "adapter"), "adapter_model.*entire checkpoint was copied"),
    "of another save": (of_another_save, "must come from one save"),
    "outside of the directory": (outside, "index of a sharded checkpoint"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_damaged_adapters_are_refused_and_change_nothing(tmp_path: Path, how: str) -> None:
    spoil, message = SPOILT[how]
    IO.save_model(adapted(), tmp_path, shard=True, use_safetensors=True)
    spoil(tmp_path)
    fresh = adapted(1)
    before = logits(fresh)
    with pytest.raises(CheckpointError, match=message):
        IO.load_model(fresh, tmp_path)
    assert torch.equal(logits(fresh), before)


def test_a_base_checkpoint_goes_into_the_base_of_adapters(tmp_path: Path) -> None:
    IO.save_model(gpt2(3), tmp_path, shard=True, use_safetensors=True)
    model = adapted(1)
    with pytest.raises(CheckpointError, match=r"missing from the file: base_model\.model\..*lora_A\.weight"):
        IO.load_model(model, tmp_path)
    IO.load_model(model, tmp_path, strict=False)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(gpt2(3)))


def test_a_model_without_adapters_has_no_names_of_its_own() -> None:
    assert AdapterNames.of(gpt2()) is None
