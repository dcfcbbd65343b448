"""What a program of transformers does with a model after boost: attributes, save_pretrained, and the full state."""

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import build
from torch import distributed as dist
from torch import nn

from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.errors import UnsupportedError
from colossal.testing import run_processes

PRELOADED.append("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft

FULL: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "zero1 with dp": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1, precision="fp32"),
}
SHARDED: dict[str, Any] = {
    "fsdp": TorchFSDPPlugin,
    "tp": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
}
PIPELINE = lambda: HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")  # noqa: E731
DIVIDED: dict[str, Any] = {
    "pp": PIPELINE,
    "sp": lambda: HybridParallelPlugin(
        tp_size=1, pp_size=1, sp_size=2, enable_sequence_parallelism=True, precision="fp32"
    ),
}


def model_of(lora: bool = False) -> Any:
    torch.manual_seed(3)
    model = build("llama")
    if lora:
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def boosted(plugin: Any, lora: bool = False) -> tuple[Booster, Any, Any]:
    model = model_of(lora)
    booster = Booster(device="cpu", plugin=plugin())
    return booster, model, booster.boost(model, torch.optim.AdamW(model.parameters()))[0]


def export(plugin: str, folder: Path, lora: bool) -> list[str]:
    """Save by transformers or peft on rank 0; return what was raised, from the model and from the user's own name."""
    _, own, model = boosted({**FULL, **SHARDED, "pp": PIPELINE}[plugin], lora)
    messages = []
    for name, target in (("unwrapped", model.unwrap(unwrap_peft=False)), ("own", own)):
        try:
            target.save_pretrained(folder / name, is_main_process=dist.get_rank() == 0)
        except UnsupportedError as error:
            messages.append(str(error))
    dist.barrier()
    return messages


@pytest.mark.parametrize("plugin", FULL)
def test_save_pretrained_works_where_parameters_are_full(plugin: str, tmp_path: Path) -> None:
    assert run_processes(export, 2, plugin, tmp_path, lora=False) == [[], []]
    for name in ("unwrapped", "own"):
        assert_equal(type(model_of()).from_pretrained(tmp_path / name).state_dict(), model_of().state_dict())


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("plugin", [*(name for name in SHARDED if name != "gemini"), "pp"])
def test_save_pretrained_is_refused_where_a_rank_has_parts(plugin: str, lora: bool, tmp_path: Path) -> None:
    for messages in run_processes(export, 2, plugin, tmp_path, lora=lora):
        assert len(messages) == 2
        for message in messages:
            assert "booster.save_model(model, directory, shard=True" in message
            assert "a pipeline stage without" in message if plugin == "pp" else "each rank has a shard" in message
    assert not list(tmp_path.rglob("*.safetensors"))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def attributes(plugin: str) -> list[str]:
    _, _, model = boosted({**FULL, **SHARDED, "pp": PIPELINE}[plugin])
    messages = []
    for name in ("config", "generate", "nothing_like_it"):
        with pytest.raises(AttributeError) as error:
            getattr(model, name)
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("plugin", [*FULL, *SHARDED, "pp"])
def test_an_attribute_of_the_own_model_is_found_by_unwrap(plugin: str) -> None:
    for config, generate, nothing in run_processes(attributes, 2, plugin):
        assert "use model.unwrap().config" in config
        advice = "and generate with what from_pretrained(directory) loads"
        assert (advice if plugin in ("pp", "gemini") else "use model.unwrap().generate") in generate
        assert nothing.endswith("' object has no attribute 'nothing_like_it'")


def state_after_a_step(plugin: str) -> list[dict[str, torch.Tensor]]:
    model = model_of()
    booster = Booster(device="cpu", plugin={**FULL, **SHARDED}[plugin]())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(booster, model, optimizer)
    return [model.state_dict(only_rank_0=choice) for choice in (True, False)]


def step(booster: Booster, model: Any, optimizer: Any) -> None:
    ids = torch.arange(32).reshape(4, 8)
    booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
    optimizer.step()


@pytest.mark.parametrize("plugin", [*FULL, *SHARDED])
def test_the_full_state_is_on_the_first_rank_or_on_all(plugin: str) -> None:
    """All ranks read the same batch, so that one process takes the same step."""
    alone = Booster(device="cpu")
    model = model_of()
    model, optimizer, *_ = alone.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(alone, model, optimizer)
    expected = model.unwrap().state_dict()
    first, second = run_processes(state_after_a_step, 2, plugin)
    assert second[0] == {}
    for found in (first[0], first[1], second[1]):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert any(not torch.equal(value, model_of().state_dict()[name]) for name, value in expected.items())
    assert_equal(model.state_dict(only_rank_0=True), expected)


def pipelined() -> str:
    _, _, model = boosted(PIPELINE)
    assert model.unwrap().config.num_hidden_layers == model_of().config.num_hidden_layers
    with pytest.raises(AttributeError, match="has no attribute 'nothing_like_it'"):
        model.unwrap().nothing_like_it  # noqa: B018
    with pytest.raises(UnsupportedError) as error:
        model.state_dict(only_rank_0=False)
    return str(error.value)


def test_no_rank_of_a_pipeline_has_the_full_state() -> None:
    assert all("booster.save_model(model, checkpoint)" in message for message in run_processes(pipelined, 2))


def test_the_boosted_model_is_copied_and_saved_by_torch_as_before(tmp_path: Path) -> None:
    import copy

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, *_ = Booster(device="cpu").boost(nn.Linear(3, 2))
        again = copy.deepcopy(model)
    assert list(again.state_dict()) == ["module.weight", "module.bias"]
    torch.save(model, tmp_path / "model")
    loaded = torch.load(tmp_path / "model", weights_only=False)
    assert torch.equal(loaded.state_dict()["module.weight"], model.state_dict()["module.weight"])
    with pytest.raises(AttributeError, match="no attribute 'module'"):
        type(model).__new__(type(model)).module  # noqa: B018 - before it has any


def generated(plugin: str) -> list[list[int]] | str:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    own = build("llama").eval()
    prompt = torch.arange(4)[None]
    expected = own.generate(prompt, **options).tolist()  # type: ignore[operator]
    booster = Booster(device="cpu", plugin={**FULL, **SHARDED, **DIVIDED}[plugin]())
    unwrapped: Any = booster.boost(own)[0].eval().unwrap()
    try:
        return [expected, unwrapped.generate(prompt, **options).tolist()]
    except (AttributeError, UnsupportedError) as error:
        return str(error)


@pytest.mark.parametrize("plugin", [*FULL, "fsdp", "tp"])
def test_generation_continues_a_prompt_as_before_boost(plugin: str) -> None:
    for expected, found in run_processes(generated, 2, plugin):
        assert found == expected


@pytest.mark.parametrize("plugin", ["pp", "sp", "gemini"])
def test_generation_without_all_layers_or_tokens_names_what_to_do(plugin: str) -> None:
    for message in run_processes(generated, 2, plugin):
        assert "save_model(model, directory, shard=True, use_safetensors=True), and generate with" in message


def merge(plugin: str, folder: Path) -> str:
    own = model_of(lora=True)
    for name, parameter in own.named_parameters():
        nn.init.constant_(parameter, 0.1) if "lora_B" in name else None
    expected = own.eval()(input_ids=torch.arange(4)[None]).logits
    booster = Booster(device="cpu", plugin={**FULL, **SHARDED, "pp": PIPELINE}[plugin]())
    model, *_ = booster.boost(own)
    with pytest.raises(AttributeError) as hint:
        model.merge_and_unload  # noqa: B018
    adapted: Any = model.unwrap(unwrap_peft=False)
    try:
        merged: Any = adapted.merge_and_unload()
    except UnsupportedError as error:
        message = str(error)
        booster.save_model(model, folder, shard=True, use_safetensors=True)
        base = type(model_of()).from_pretrained(folder)
        again: Any = peft.PeftModel.from_pretrained(base, folder / "adapter")
        merged = again.merge_and_unload().eval()  # as the error says
        torch.testing.assert_close(merged(input_ids=torch.arange(4)[None]).logits, expected)
        return message if message in str(hint.value) else "another hint"
    assert "use model.unwrap(unwrap_peft=False).merge_and_unload" in str(hint.value)
    # transformers has a method of this name too, for adapters that it has loaded itself
    with pytest.raises(AttributeError, match=r"use model.unwrap\(unwrap_peft=False\).set_adapter"):
        _ = model.set_adapter
    booster.save_model(merged, folder, shard=True, use_safetensors=True)
    loaded = type(model_of()).from_pretrained(folder).eval()
    torch.testing.assert_close(loaded(input_ids=torch.arange(4)[None]).logits, expected)
    return ""


@pytest.mark.parametrize(
    "plugin",
    [pytest.param(each, marks=() if each in ("tp", "pp") else pytest.mark.slow) for each in (*FULL, *SHARDED, "pp")],
)
def test_adapters_are_merged_or_the_error_says_how(plugin: str, tmp_path: Path) -> None:
    is_refused = plugin in ("gemini", "pp", "fsdp")
    for message in run_processes(merge, 2, plugin, tmp_path):
        assert ('PeftModel.from_pretrained(base, f"{directory}/adapter").merge_and_unload()' in message) is is_refused
