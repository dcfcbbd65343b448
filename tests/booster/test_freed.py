"""`del model, optimizer` frees their memory at once, under every plugin: no reference cycle leaves it to the collector.

FSDP is not among them: the state of torch's own `fully_shard` and the context that all states share hold each other.
"""

import gc
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from families import build
from plugins import HYBRID, plugins
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from colossal._src.testing.limits import scaled
from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from colossal.errors import UnsupportedError
from colossal.nn.optimizer import HybridAdam
from colossal.testing import fake_world, run_processes

CASES = plugins("DDP", "ZeRO-1", "ZeRO-2", "Gemini", "tp2", "pp2")
SLOW: dict[str, Callable[..., Any]] = {
    **plugins("Hybrid", "Hybrid with ZeRO-1", "Gemini, tp2"),
    "ZeRO-1, overlapped": lambda: LowLevelZeroPlugin(precision="bf16", overlap_allgather=True),
    "Gemini, auto": lambda: GeminiPlugin(precision="bf16", placement_policy="auto"),
    "Hybrid, fp16": lambda: HYBRID(1, 1, precision="fp16"),
}
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "HybridAdam": HybridAdam}
IDS = torch.arange(24).view(2, 12)


def tied_model() -> nn.Module:
    """A model with tied parameters, and with a buffer that ranks keep equal."""
    model = build("llama-tied").float()
    model.get_submodule("model.norm").register_buffer("kept", torch.zeros(1))
    return model


def train(plugin: str, kind: str) -> tuple[list[Any], list[StorageWeakRef]]:
    """Make two steps; return weak references to what they needed."""
    model, booster = tied_model(), Booster(device="cpu", plugin=(CASES | SLOW)[plugin](), max_norm=1.0)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-3)
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    assert wrapped is not None
    for _ in range(2):
        batch = iter([{"input_ids": IDS, "labels": IDS}])
        booster.execute_pipeline(batch, boosted, lambda outputs, _: outputs.loss, wrapped)
        wrapped.step()
        wrapped.zero_grad()
    updated: Iterable[torch.Tensor] = wrapped.parameters
    parts: list[Any] = [boosted, wrapped, optimizer, wrapped.masters, *boosted.parameters(), *updated]
    return [weakref.ref(each) for each in parts if each is not None], [
        StorageWeakRef(each.untyped_storage()) for each in updated
    ]


def kinds_left(plugin: str, kind: str) -> set[str]:
    train(plugin, kind)  # modules that it imports leave frames in cycles, with what these hold
    gc.collect()
    gc.disable()
    try:
        parts, storages = train(plugin, kind)
        deadline = time.monotonic() + scaled(30.0)  # a thread that communicates lets go of a tensor a moment later
        while time.monotonic() < deadline and not all(each.expired() for each in storages):
            time.sleep(0.01)
        left = {type(part()).__name__ for part in parts if part() is not None}
        return left | ({"storages"} if not all(each.expired() for each in storages) else set())
    finally:
        gc.enable()


def left_by(plugin: str) -> dict[str, set[str]]:
    return {kind: kinds_left(plugin, kind) for kind in OPTIMIZERS}


@pytest.mark.parametrize("plugin", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_model_that_is_deleted_is_freed_at_once(plugin: str) -> None:
    # not in threads: another rank may still hold what it has read in a collective
    assert run_processes(left_by, 2, plugin) == [{kind: set() for kind in OPTIMIZERS}] * 2


def test_a_parameter_that_outlives_its_model_says_so() -> None:
    with fake_world(1):
        model = tied_model()
        boosted, *_ = Booster(device="cpu", plugin=GeminiPlugin(precision="fp32")).boost(model)
        weight: Any = boosted.unwrap().get_submodule("model.norm").weight
        del model, boosted
        with pytest.raises(UnsupportedError, match="after that model was freed. Keep what boost returned"):
            weight.sum()
