"""`optimizer.state_dict(only_rank_0=...)` is the state of one process, whatever ranks hold of it."""

from typing import Any

import pytest
import torch
from families import build, inputs_of
from float64 import KeepFloat64
from plugins import plugins
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.errors import UnsupportedError
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "tp2", "pp2")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def check_states(plugins: list[str]) -> None:
    reference = build("llama")
    expected = adam(reference)
    with KeepFloat64():  # sums over ranks are rounded to float32 otherwise, as the processor adds them
        reference(**inputs_of("llama")).loss.backward()
    expected.step()
    for plugin in plugins:
        booster, own = Booster(device="cpu", plugin=PLUGINS[plugin]()), build("llama")
        model, optimizer, *_ = booster.boost(own, adam(own))
        with KeepFloat64():
            booster.execute_pipeline(iter([inputs_of("llama")]), model, lambda out, _: out.loss, optimizer)
        optimizer.step()
        if plugin == "pp2":
            with pytest.raises(UnsupportedError, match=r"Call booster\.save_optimizer\(optimizer, checkpoint\)"):
                optimizer.state_dict(only_rank_0=True)
            continue
        check_state(plugin, optimizer.state_dict(only_rank_0=False), expected.state_dict())
        first_only = optimizer.state_dict(only_rank_0=True)
        assert bool(first_only) == (dist.get_rank() == 0), plugin
        if first_only:
            check_state(plugin, first_only, expected.state_dict())


def check_state(plugin: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert [group["params"] for group in found["param_groups"]] == [
        group["params"] for group in expected["param_groups"]
    ], plugin
    assert found["state"].keys() == expected["state"].keys(), plugin
    for number, entry in expected["state"].items():
        for name, value in entry.items():
            assert torch.allclose(found["state"][number][name], value, rtol=1e-9, atol=1e-12), (plugin, number, name)


@pytest.mark.parametrize("plugins", [["DDP", "FSDP", "ZeRO-1"], ["ZeRO-2", "Gemini", "tp2", "pp2"]])
def test_the_full_state_is_that_of_one_process(plugins: list[str]) -> None:
    run_processes(check_states, 2, plugins)
