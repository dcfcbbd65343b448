"""Saved adapters are whole, the old or the new ones, whenever the process that replaces them dies or fails."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from colossal._src.checkpoint_io import model_config
from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.errors import CheckpointError
from colossal.testing import WorldError, run_processes

pytestmark = pytest.mark.slow

PRELOADED.append("peft")


def adapted(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    return Booster(device="cpu").enable_lora(base(), lora_config=config)


def base() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.flatten() for name, value in sorted(model.state_dict().items()) if "lora_" in name])


def save_and_die(folder: Path, at: int, use_safetensors: bool) -> int:
    """Replace the adapters, and die at a call that makes something lasting; return the number of these calls."""
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                os._exit(9)
            return function(*arguments, **keywords)

        return call

    for name in ("fsync", "replace", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    Booster(device="cpu").save_lora_as_pretrained(adapted(2), folder, use_safetensors=use_safetensors)
    return calls


@pytest.mark.parametrize("use_safetensors", [True, False])
def test_a_process_that_dies_leaves_whole_adapters(use_safetensors, tmp_path) -> None:
    (total,) = run_processes(save_and_die, 1, tmp_path / "whole", 0, use_safetensors, fresh=True)
    assert total >= 4
    old, new, seen = weights_of(adapted(1)), weights_of(adapted(2)), set()
    for at in range(1, total + 1):
        folder = tmp_path / str(at)
        Booster(device="cpu").save_lora_as_pretrained(adapted(1), folder, use_safetensors=True)
        with pytest.raises(WorldError, match="exit code 9"):
            run_processes(save_and_die, 1, folder, at, use_safetensors, fresh=True)
        found = weights_of(peft.PeftModel.from_pretrained(base(), folder))
        assert torch.equal(found, old) or torch.equal(found, new)
        seen.add("old" if torch.equal(found, old) else "new")
        model = Booster(device="cpu").enable_lora(base(), pretrained_dir=folder)
        assert torch.equal(weights_of(model), found)
    assert seen == {"old", "new"}


def test_a_save_that_fails_leaves_the_old_adapters_and_nothing_else(tmp_path, monkeypatch) -> None:
    booster = Booster(device="cpu")
    booster.save_lora_as_pretrained(adapted(1), tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_config, "adapter_config_file", lambda _: {"adapter_config.json": fail})
    with pytest.raises(CheckpointError, match="No space left on device"):
        booster.save_lora_as_pretrained(adapted(2), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert torch.equal(weights_of(peft.PeftModel.from_pretrained(base(), tmp_path)), weights_of(adapted(1)))
