# pyright: reportArgumentType=false
"""An optimizer that was built before the adapters trains them as one that was built after them in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from equality import assert_equal
from families import build, inputs_of
from float64 import KeepFloat64
from plugins import HYBRID, plugins
from torch import nn
from torch.optim.lr_scheduler import StepLR

from colossal._src.booster.lora.frozen_params import drop_frozen_params
from colossal._src.interface.boost_types import Parts
from colossal._src.tensor import backing_shard
from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.errors import ConfigError
from colossal.tensor import full_tensor_of
from colossal.testing import run_processes

PRELOADED.append("peft")
pytestmark = [pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"), pytest.mark.slow]

STEPS = 3
TARGETS = ["q_proj", "v_proj", "down_proj"]
PLUGINS = plugins("none", "DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini") | {
    "Hybrid, tp2": partial(HYBRID, 2, 1, parallel_output=False),
    "Hybrid, pp2": plugins("pp2")["pp2"],
}
SPLITS: dict[str, Callable[[nn.Module], Any]] = {
    "one group": lambda model: model.parameters(),
    "two groups alike": lambda model: [
        {"params": [each for each in model.parameters() if each.dim() == 1]},
        {"params": [each for each in model.parameters() if each.dim() != 1]},
    ],
    "with names": lambda model: model.named_parameters(),
}


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=TARGETS, **options)


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return build("llama")


def batch_of(step: int) -> dict[str, torch.Tensor]:
    pairs = [inputs_of("llama", num_changed=each) for each in (step, step + 4)]
    return {key: torch.cat([pair[key] for pair in pairs]) for key in pairs[0]}


def loss_of(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.loss


def train(booster: Booster, model: nn.Module, optimizer: Any, schedule: Any) -> dict[str, Any]:
    model, optimizer, criterion, _, schedule = booster.boost(model, optimizer, loss_of, lr_scheduler=schedule)
    rank, size = booster.plugin.data_parallel_rank_and_size()
    losses, norms, values = [], [], {}
    for step in range(STEPS):
        batch = {key: value.chunk(size)[rank] for key, value in batch_of(step).items()}
        losses.append(booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"].item())
        norms.append(optimizer.get_grad_norm())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    working = {} if optimizer.masters is None else optimizer.masters.pairs
    for each in optimizer.parameters:
        own = full_tensor_of(backing_shard(working.get(each, each))).detach()
        values[optimizer.param_names[each]] = getattr(own, "full_tensor", own.clone)()
    lrs = [group["lr"] for group in optimizer.param_groups]
    return {"losses": losses, "norms": norms, "values": values, "lrs": lrs}


def before(split: str, plugin: Any) -> dict[str, Any]:
    booster, model = Booster(device="cpu", plugin=plugin), model_of()
    optimizer = torch.optim.AdamW(SPLITS[split](model), lr=0.01, weight_decay=0.1)
    schedule = StepLR(optimizer, 1, gamma=0.5)
    return train(booster, booster.enable_lora(model, lora_config=lora()).double(), optimizer, schedule)


def all_before(plugin: str) -> dict[str, dict[str, Any]]:
    with KeepFloat64():
        return {split: before(split, PLUGINS[plugin]()) for split in SPLITS}


@pytest.fixture(scope="module")
def after() -> dict[str, Any]:
    """One process, in which the optimizer is built of the adapters."""
    model = peft.get_peft_model(model_of(), lora()).double()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    with KeepFloat64():
        return train(Booster(device="cpu"), model, optimizer, StepLR(optimizer, 1, gamma=0.5))


@pytest.mark.parametrize("plugin", PLUGINS)
def test_adapters_join_an_optimizer_that_was_built_before_them(plugin: str, after: dict[str, Any]) -> None:
    ranks = run_processes(all_before, 1 if plugin == "none" else 2, plugin)
    for split in SPLITS:
        found = [rank[split] for rank in ranks]
        losses = torch.tensor([each["losses"] for each in found], dtype=torch.float64).mean(0)
        assert_equal(losses, torch.tensor(after["losses"], dtype=torch.float64), f"{split}: losses")
        seen: dict[str, torch.Tensor] = {}
        for each in found:
            assert each["norms"] == pytest.approx(after["norms"], rel=1e-9)
            assert set(each["lrs"]) == set(after["lrs"])
            seen |= each["values"]
        assert seen.keys() == after["values"].keys()
        for key, value in after["values"].items():
            assert_equal(seen[key], value, f"{split}: {key}")


def adapted(optimizer_of: Callable[[nn.Module], Any], config: peft.LoraConfig | None = None) -> Parts:
    model = build("gpt2") if config else model_of()
    optimizer = optimizer_of(model)
    return Parts(Booster(device="cpu").enable_lora(model, lora_config=config or lora()), optimizer, None, None, None)


def test_parameters_come_in_the_order_of_the_model_and_the_log_tells(capsys: pytest.CaptureFixture[str]) -> None:
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, bias="all", modules_to_save=["wpe"])
    parts = adapted(lambda model: torch.optim.AdamW(model.named_parameters()), config)
    held = parts.optimizer.param_groups[0]
    drop_frozen_params(parts)
    expected = {name: each for name, each in parts.model.named_parameters() if each.requires_grad}
    assert all(a is b for a, b in zip(held["params"], expected.values(), strict=True))
    assert len(held["param_names"]) == len(expected)
    for short, name in zip(held["param_names"], expected, strict=True):  # biases had a name already
        assert name.replace(".base_layer", "").endswith(short)
    assert "5 parameters of these join its first group" in capsys.readouterr().err
    drop_frozen_params(parts)
    assert not capsys.readouterr().err, "they are in it now"


def test_states_of_what_is_frozen_now_are_dropped() -> None:
    def stepped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters())
        model(**inputs_of("llama")).loss.backward()
        optimizer.step()
        return optimizer

    parts = adapted(stepped)
    assert parts.optimizer.state
    drop_frozen_params(parts)
    assert not parts.optimizer.state


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    vectors = [each for each in model.parameters() if each.dim() == 1]
    others = [each for each in model.parameters() if each.dim() != 1]
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": others, "lr": 0.5}], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer_of", "message"),
    [
        (two_groups, r"groups 0 and 1 with weight_decay=0\.0 and 0\.01, lr=0\.1 and 0\.5, and 12 parameters of adapt"),
        (lambda _: torch.optim.SGD(nn.Linear(2, 2).parameters()), "2 parameters in it that are frozen or gone"),
    ],
)
def test_what_may_be_meant_in_two_ways_is_refused(optimizer_of: Any, message: str) -> None:
    parts = adapted(optimizer_of)
    with pytest.raises(ConfigError, match=message):
        drop_frozen_params(parts)


def test_some_of_the_adapters_beside_what_is_frozen_are_refused() -> None:
    parts = adapted(lambda _: None)
    some = [each for name, each in parts.model.named_parameters() if "q_proj" in name]
    parts = Parts(parts.model, torch.optim.SGD(some), None, None, None)
    with pytest.raises(ConfigError, match="8 adapters missing"):
        drop_frozen_params(parts)
