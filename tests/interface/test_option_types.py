# pyright: reportArgumentType=false, reportCallIssue=false
"""Options as command lines and YAML give them: text is no number and no flag, whatever Python would make of it."""

import inspect
from typing import Any

import numpy as np
import pytest

from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.errors import ConfigError
from colossal.legacy.booster import MoeHybridParallelPlugin
from colossal.testing import fake_world

KINDS: dict[Any, str] = {bool: "True or False", int: "an integer", float: "a number"}
TEXTS: dict[Any, str] = {bool: "false", int: "2", float: "1e-3"}
CONVERSIONS: dict[Any, str] = {bool: "{} == 'true'", int: "int({})", float: "float({})"}
OTHERS: dict[Any, list[Any]] = {bool: [None, 2, [], "False"], int: [1.5, []], float: [float("nan"), []]}
REQUIRED: dict[Any, dict[str, Any]] = {
    Booster: {"device": "cpu"},
    TorchDDPPlugin: {},
    TorchFSDPPlugin: {},
    LowLevelZeroPlugin: {},
    GeminiPlugin: {},
    HybridParallelPlugin: {"tp_size": 1, "pp_size": 1},
    MoeHybridParallelPlugin: {"tp_size": 1, "pp_size": 1, "ep_size": 1},
}


def options_of(constructor: Any) -> list[tuple[str, Any]]:
    """Return the names and the types of flags and numbers."""
    annotations = {name: each.annotation for name, each in inspect.signature(constructor).parameters.items()}
    named = [(name, each, each | None) for name, each in annotations.items() if not isinstance(each, str)]
    return [(name, kind) for name, each, optional in named for kind in KINDS if optional == kind | None]


@pytest.mark.parametrize("constructor", REQUIRED)
def test_every_flag_and_number_refuses_text(constructor: Any) -> None:
    options = options_of(constructor)
    assert len(options) >= 2
    for name, kind in options:
        for value in (TEXTS[kind], *OTHERS[kind]):
            with pytest.raises(ConfigError) as error:
                constructor(**REQUIRED[constructor] | {name: value})
            assert f"{constructor.__name__} takes {name} as {KINDS[kind]}. Found {name}={value!r}" in str(error.value)
            assert not isinstance(value, str) or CONVERSIONS[kind].format(name) in str(error.value)


@pytest.mark.parametrize("constructor", REQUIRED)
def test_a_misspelled_option_has_the_closest_name(constructor: Any) -> None:
    name = options_of(constructor)[-1][0]
    with pytest.raises(TypeError, match=f"{constructor.__name__} takes no option '{name}s'. Did you mean '{name}'"):
        constructor(**REQUIRED[constructor] | {f"{name}s": 1})


def test_numbers_of_other_kinds_are_numbers() -> None:
    with fake_world(1):
        plugin = LowLevelZeroPlugin(np.int64(2), max_norm=np.float32(0.5), cpu_offload=np.bool_(False), verbose=0)
        HybridParallelPlugin(1, 1, max_norm=1, num_microbatches=None, min_scale=None)
        assert Booster(device="cpu", plugin=plugin, max_norm=2).plugin is plugin


class OwnPlugin(HybridParallelPlugin):
    def __init__(self, tp_size: str, layers: str) -> None:
        super().__init__(int(tp_size), 1)
        self.layers = layers


def test_a_plugin_of_a_program_takes_what_it_likes() -> None:
    with fake_world(1):
        assert OwnPlugin("1", layers="4").layers == "4"
