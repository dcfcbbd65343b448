"""What docs/plugins.toml tells readers about each plugin is what that plugin does."""

import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from colossal.accelerator import get_accelerator
from colossal.booster import Booster, Parts
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.testing import fake_world

from colossal._src.booster.plugin.single_process import SingleProcessPlugin  # isort: skip
from colossal._src.interface import reduce_in_each_pass  # isort: skip

FILE = Path(__file__).parents[2] / "docs/plugins.toml"
ROWS = {row["key"]: row for row in tomllib.loads(FILE.read_text(encoding="utf-8"))["plugin"]}
PLUGINS = {
    "single": (SingleProcessPlugin,),
    "ddp": (TorchDDPPlugin,),
    "zero": tuple(lambda stage=stage: LowLevelZeroPlugin(stage=stage, precision="fp32") for stage in (1, 2)),
    "fsdp": (TorchFSDPPlugin,),
    "hybrid": tuple(
        lambda sizes=(pp, zero): HybridParallelPlugin(
            tp_size=1, pp_size=sizes[0], zero_stage=sizes[1], num_microbatches=2, precision="fp32"
        )
        for pp, zero in ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1))
    ),
    "gemini": (lambda: GeminiPlugin(precision="fp32"),),
}
# what a cell says where `no_sync` changes what is sent, and where it does not
CHANGES = {"en": ("keeps", "leaves"), "zh-Hans": ("保留", "不归约")}
NO_EFFECT = {"en": ("no effect", "changes nothing"), "zh-Hans": ("不起作用",)}
YES = {"en": "yes", "zh-Hans": "支持"}
NO = {"en": "no:", "zh-Hans": "不支持"}
cells = pytest.mark.parametrize(("key", "language"), [(key, language) for key in ROWS for language in YES])


def make_parts() -> Parts:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return Parts(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_each_plugin_has_a_row_with_its_precisions() -> None:
    assert ROWS.keys() == PLUGINS.keys()
    for key, (make, *_) in PLUGINS.items():
        with fake_world(2):
            assert tuple(ROWS[key]["precision"].split(", ")) == make().supported_precisions


def test_the_documented_methods_of_a_plugin_answer_as_its_attributes_do() -> None:
    for make, *_ in PLUGINS.values():
        with fake_world(2):
            plugin = make()
            assert plugin.supported_precisions() == list(plugin.supported_precisions)
            assert plugin.supported_devices == ()
            assert {"cpu", get_accelerator().name} == set(plugin.supported_devices())
            assert plugin.control_precision() == plugin.has_own_precision
            assert plugin.control_device()
            assert plugin.control_checkpoint_io()
            assert plugin.support_no_sync()
            assert plugin.support_lora()


@cells
def test_no_sync(key, language) -> None:
    effects = set()
    for make in PLUGINS[key]:
        with fake_world(4):
            boosted = make().configure(make_parts(), torch.device("cpu"), None)
        effects.add(boosted.capabilities.no_sync not in (nullcontext, reduce_in_each_pass))
    cell = ROWS[key][language]["no_sync"]
    assert any(word in cell for word in CHANGES[language]) == (True in effects)
    assert any(word in cell for word in NO_EFFECT[language]) == (False in effects)


@cells
def test_clipping_and_axes(key, language) -> None:
    row = ROWS[key][language]
    for make in PLUGINS[key]:
        with fake_world(4):
            booster = Booster(plugin=None if key == "single" else make(), max_norm=1.0)
            parts = make_parts()
            _, optimizer, *_ = booster.boost(parts.model, parts.optimizer)
            assert row["clipping"] == YES[language]
            assert callable(optimizer.clip_grad_by_norm)
            has_tp = "tp" in make().supported_axes
        assert row["tensor_parallel"].startswith(NO[language]) != has_tp


@cells
def test_plugins_that_shard_parameters_have_no_limit_of_parameters(key, language) -> None:
    # their memory is that of the formula, over as many ranks as there are
    is_limited = any(word in ROWS[key][language]["when"] for word in ("billion", "亿"))
    assert is_limited == (key in ("ddp", "zero"))
