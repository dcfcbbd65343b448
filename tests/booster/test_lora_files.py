# pyright: reportArgumentType=false
"""Saved adapters: peft loads them on its own, any plugin goes on from them, and mistakes leave the model alone."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from chosen import ALL
from plugins import plugins
from torch import distributed as dist
from torch import nn

from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.booster.plugin import Plugin, TorchDDPPlugin
from colossal.checkpoint_io import CheckpointIO
from colossal.errors import CheckpointError, ConfigError, UnsupportedError
from colossal.testing import assert_close, run_processes

PRELOADED.append("peft")

PLUGINS = dict(zip(("none", "ddp", "fsdp", "zero"), plugins("none", "DDP", "FSDP", "ZeRO-2").values(), strict=True))


def build(width: int = 8) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def config(**keywords: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["0", "2"], **keywords)


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 48).view(8, 6)


def train(booster: Booster, model: nn.Module, steps: int = 3) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, *_ = booster.boost(model, optimizer)
    run(booster, model, optimizer, steps)
    return model, optimizer


def run(booster: Booster, model: Any, optimizer: Any, steps: int) -> list[float]:
    rank, size = booster.plugin.data_parallel_rank_and_size()
    losses = []
    for _ in range(steps):
        loss = (model(inputs().chunk(size)[rank]) - 1).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def outputs_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(inputs())


def adapters(booster: Booster, **keywords: Any) -> nn.Module:
    torch.manual_seed(4)
    return booster.enable_lora(build(), lora_config=config(**keywords))


def test_a_checkpoint_io_writes_the_same_directory(tmp_path: Path) -> None:
    model = adapters(Booster(device="cpu"))
    Booster(device="cpu").save_lora_as_pretrained(model, tmp_path / "booster", use_safetensors=True)
    CheckpointIO().save_lora_as_pretrained(model, tmp_path / "io", use_safetensors=True)
    names = {path.name for path in (tmp_path / "io").iterdir()}
    assert names == {path.name for path in (tmp_path / "booster").iterdir()} >= {"adapter_model.safetensors"}
    found = peft.PeftModel.from_pretrained(build(), tmp_path / "io")
    assert torch.equal(outputs_of(found), outputs_of(model))
    with pytest.raises(ConfigError, match="needs a model with adapters"):
        CheckpointIO().save_lora_as_pretrained(build(), tmp_path / "plain")


def save(plugin: str, folder: Path, use_safetensors: bool) -> tuple[torch.Tensor, list[float]]:
    """Train, save, go on for a step; return what the model said when it was saved, and the later losses."""
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer = train(booster, adapters(booster))
    booster.save_lora_as_pretrained(model, folder, use_safetensors=use_safetensors)
    outputs = outputs_of(model)
    booster.save_model(model, folder / "whole")
    booster.save_optimizer(optimizer, folder / "optimizer")
    return outputs, run(booster, model, optimizer, 2)


def load(plugin: str, folder: Path) -> tuple[torch.Tensor, list[float], list[float]]:
    """Continue from the adapters alone, and from a checkpoint of model and optimizer."""
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    model, optimizer = train(booster, booster.enable_lora(build(), pretrained_dir=folder), steps=0)
    outputs, losses = outputs_of(model), run(booster, model, optimizer, 2)
    model, optimizer = train(booster, adapters(booster), steps=0)
    booster.load_model(model, folder / "whole")
    booster.load_optimizer(optimizer, folder / "optimizer")
    return outputs, losses, run(booster, model, optimizer, 2)


WORLDS = [
    ("none", 1),
    *(
        pytest.param(plugin, size, marks=() if size == 2 else pytest.mark.slow)
        for plugin in ("ddp", "fsdp")
        for size in (1, 2, 4)
    ),
    ("zero", 2),
]


def mean(losses: list[list[float]]) -> torch.Tensor:
    return torch.tensor(losses).mean(0)


@pytest.mark.chosen
@pytest.mark.parametrize(("plugin", "size"), WORLDS)
def test_what_any_world_saves_peft_and_any_world_load(plugin, size, tmp_path) -> None:
    use_safetensors = size != 2
    saved = run_processes(save, size, plugin, tmp_path, use_safetensors)
    expected, later = saved[0][0], mean([losses for _, losses in saved])
    alone = peft.PeftModel.from_pretrained(build(), tmp_path)
    assert_close(outputs_of(alone), expected)
    assert not torch.allclose(outputs_of(build()), expected, atol=0.01), "the adapters learned nothing"
    for other, ranks in (("none", 1), ("ddp", 2), ("fsdp", 4 if ALL or size == 4 else 2)):
        loaded = run_processes(load, ranks, other, tmp_path)
        for outputs, _, _ in loaded:
            assert_close(outputs, expected)
        assert_close(mean([losses for *_, losses in loaded]), later)
        fresh = mean([losses for _, losses, _ in loaded])
        assert_close(fresh[0], later[0])


def test_adapters_that_peft_saved_go_on(tmp_path) -> None:
    torch.manual_seed(1)
    model = peft.get_peft_model(build(), config(init_lora_weights=False, use_dora=True))
    model.save_pretrained(tmp_path)
    adapted = Booster(device="cpu").enable_lora(build(), pretrained_dir=tmp_path)
    assert torch.equal(outputs_of(adapted), outputs_of(model))
    assert any(parameter.requires_grad for parameter in adapted.parameters())


def test_a_configuration_repeats_that_of_saved_adapters(tmp_path) -> None:
    booster = Booster(device="cpu")
    model, _ = train(booster, booster.enable_lora(build(), lora_config=config(lora_alpha=4)))
    booster.save_lora_as_pretrained(model, tmp_path)
    same = booster.enable_lora(build(), pretrained_dir=tmp_path, lora_config=config(lora_alpha=4))
    assert_close(outputs_of(same), outputs_of(model))
    with pytest.raises(ConfigError, match=r"Found another lora_alpha=6 \(saved: 4\)"):
        booster.enable_lora(build(), pretrained_dir=tmp_path, lora_config=config(lora_alpha=6))


def test_adapters_of_a_classifier_go_on(tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForSequenceClassification(LlamaConfig(**sizes, vocab_size=16, pad_token_id=0))
    booster = Booster(device="cpu")
    adapted: Any = booster.enable_lora(copy.deepcopy(base), lora_config=peft.LoraConfig(r=2, task_type="SEQ_CLS"))
    nn.init.ones_(adapted.base_model.model.score.modules_to_save["default"].weight)
    model, *_ = booster.boost(adapted)
    booster.save_lora_as_pretrained(model, tmp_path)
    # peft adds the names of heads of all families to the configuration that it saves
    assert "classifier" in json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"]
    again = booster.enable_lora(base, pretrained_dir=tmp_path)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert_close(again(tokens).logits, model(tokens).logits)


def test_saving_again_replaces_the_adapters_in_either_format(tmp_path) -> None:
    booster = Booster(device="cpu")
    model = adapters(booster)
    for use_safetensors in (True, False, False, True):
        torch.manual_seed(int(use_safetensors))
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
        booster.save_lora_as_pretrained(model, tmp_path, use_safetensors=use_safetensors)
        weights = "adapter_model.safetensors" if use_safetensors else "adapter_model.bin"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", weights]
        assert_close(outputs_of(peft.PeftModel.from_pretrained(build(), tmp_path)), outputs_of(model))


def test_unwrapping_and_merging() -> None:
    booster, base = Booster(device="cpu"), build()
    torch.manual_seed(4)
    adapted = booster.enable_lora(base, lora_config=config())
    model, _ = train(booster, adapted)
    assert model.unwrap() is base
    assert model.unwrap(unwrap_peft=False) is adapted
    expected = outputs_of(model)
    merged = model.unwrap(unwrap_peft=False).merge_and_unload()
    assert {type(module) for module in merged} == {nn.Linear, nn.Tanh}
    assert_close(outputs_of(merged), expected)


WRONG_CONFIGURATIONS = {
    "neither": ({}, "Found neither"),
    "no configuration": ({"lora_config": {"r": 2}}, "lora_config is a peft.LoraConfig. Found dict"),
    "another method": ({"lora_config": peft.IA3Config(target_modules=["0"])}, "Found IA3Config"),
    "no such layer": ({"lora_config": peft.LoraConfig(target_modules=["q_proj"])}, "peft rejects Sequential"),
    "one of two": ({"lora_config": peft.LoraConfig(target_modules=["0", "q_proj"])}, r"Found \['q_proj'\]"),
    "not a linear layer": ({"lora_config": peft.LoraConfig(target_modules=["0", "1"])}, "Tanh.* is not supported"),
    "no such saved layer": ({"lora_config": config(modules_to_save=["head"])}, r"modules_to_save .* \['head'\]"),
    "useless quantisation": (
        {"lora_config": config(), "bnb_quantization_config": object()},
        "Found it with quantize=False",
    ),
}


@pytest.mark.parametrize("name", WRONG_CONFIGURATIONS)
def test_a_wrong_configuration_leaves_the_model_alone(name) -> None:
    keywords, message = WRONG_CONFIGURATIONS[name]
    model = build()
    modules = dict(model.named_modules())
    with pytest.raises(ConfigError, match=message):
        Booster(device="cpu").enable_lora(model, **keywords)
    assert dict(model.named_modules()) == modules
    assert all(parameter.requires_grad for parameter in model.parameters())


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def cut_off(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def of_another_kind(folder: Path) -> None:
    peft.IA3Config(target_modules=["0"], feedforward_modules=[]).save_pretrained(folder)


SPOILT = {
    "no directory": (shutil.rmtree, "Found no directory"),
    "no adapters": (lambda folder: (folder / "adapter_config.json").unlink(), "Found a directory without it"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "Found neither in"),
    "cut off": (cut_off, "adapter_model.safetensors"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "peft cannot read"),
    "another kind": (of_another_kind, "Found .*IA3"),
    "another rank": (lambda folder: configure(folder, r=4), "lora_A.weight"),
    "fewer layers": (lambda folder: configure(folder, target_modules=["0"]), "2.lora_A.weight"),
    "other layers": (lambda folder: configure(folder, target_modules=["q_proj"]), "q_proj"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_adapters_that_do_not_fit_leave_the_model_alone(how, tmp_path) -> None:
    booster, folder = Booster(device="cpu"), tmp_path / "adapters"
    booster.save_lora_as_pretrained(adapters(booster), folder, use_safetensors=True)
    spoil, message = SPOILT[how]
    spoil(folder)
    model = build()
    modules = dict(model.named_modules())
    with pytest.raises((CheckpointError, ConfigError), match=message):
        booster.enable_lora(model, pretrained_dir=folder)
    assert dict(model.named_modules()) == modules
    assert all(parameter.requires_grad for parameter in model.parameters())


def refusals(folder: Path) -> list[str]:
    """Let the files differ between the ranks; all must raise the same."""
    booster = Booster(device="cpu", plugin=TorchDDPPlugin())
    found = []
    with pytest.raises(CheckpointError) as error:
        booster.enable_lora(build(), pretrained_dir=folder if dist.get_rank() == 0 else folder / "elsewhere")
    found.append(str(error.value))
    with pytest.raises(CheckpointError) as error:
        booster.save_lora_as_pretrained(adapters(booster), folder / "adapter_config.json")
    found.append(str(error.value))
    return found


def test_all_ranks_raise_the_same(tmp_path) -> None:
    booster = Booster(device="cpu")
    booster.save_lora_as_pretrained(adapters(booster), tmp_path)
    first, second = run_processes(refusals, 2, tmp_path)
    assert first == second
    assert "Found no directory" in first[0]
    assert "rank 1" in first[0]
    assert "Found the file" in first[1]
    assert "rank 0" in first[1]


class WithoutLora(Plugin):
    """A plugin that says nothing about LoRA."""

    supported_devices = ("cpu",)
    supported_precisions = ()
    configure = get_checkpoint_io = data_parallel_rank_and_size = None  # type: ignore[assignment]


def test_the_order_of_the_verbs() -> None:
    booster = Booster(device="cpu")
    adapted = booster.enable_lora(build(), lora_config=config())
    with pytest.raises(ConfigError, match="Found one that has adapters already"):
        booster.enable_lora(adapted, lora_config=config())
    model, *_ = booster.boost(adapted)
    with pytest.raises(ConfigError, match="Found one that is boosted already"):
        booster.enable_lora(model, lora_config=config())
    plain, *_ = booster.boost(build())
    with pytest.raises(ConfigError, match="Found Sequential without any"):
        booster.save_lora_as_pretrained(plain, "here")
    with pytest.raises(UnsupportedError, match="Found WithoutLora, which does not yet"):
        Booster(device="cpu", plugin=WithoutLora()).enable_lora(build(), lora_config=config())


def test_an_optimizer_of_some_adapters_is_the_users_choice() -> None:
    booster = Booster(device="cpu")
    model = adapters(booster)
    some = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    _, optimizer, *_ = booster.boost(model, torch.optim.AdamW(some))
    assert optimizer.parameters == some


def test_frozen_parameters_of_a_model_without_adapters_stay_in_its_optimizer() -> None:
    model = build()
    model[0].requires_grad_(False)
    _, optimizer, *_ = Booster(device="cpu").boost(model, torch.optim.AdamW(model.parameters()))
    assert len(optimizer.parameters) == 4


def test_without_peft_the_error_says_what_to_install(monkeypatch) -> None:
    configuration = config()
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UnsupportedError, match=r"pip install -e '\.\[lora\]'"):
        Booster(device="cpu").enable_lora(build(), lora_config=configuration)


def test_saving_a_model_with_adapters_says_where_they_are(tmp_path, logged) -> None:
    from colossal._src.booster import checkpoint_mixin

    checkpoint_mixin._say_where_adapters_are.cache_clear()
    booster = Booster(device="cpu")
    plain, *_ = booster.boost(build())
    model, *_ = booster.boost(adapters(booster))
    booster.save_model(plain, tmp_path / "plain", shard=True)
    booster.save(tmp_path / "run", model, step=1)  # to resume; nobody loads it by from_pretrained
    assert "adapters" not in "\n".join(logged())
    booster.save_model(model, tmp_path / "adapted", shard=True)
    booster.save_model(model, tmp_path / "adapted", shard=True)
    (warning,) = (text for text in logged() if "adapters" in text)
    assert "booster.save_lora_as_pretrained(model, directory)" in warning
    assert "model.unwrap(unwrap_peft=False).merge_and_unload()" in warning
