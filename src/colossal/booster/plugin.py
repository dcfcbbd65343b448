"""Recipes of parallelism for `Booster`. The names are loaded when they are first used: a program needs one of them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal._src.booster.plugin import (
        GeminiPlugin,
        HybridParallelPlugin,
        LowLevelZeroPlugin,
        Plugin,
        StepPlan,
        TorchDDPPlugin,
        TorchFSDPPlugin,
        plan_step,
        wrap_parts,
    )

_MODULE_OF = {
    "GeminiPlugin": "colossal._src.booster.plugin",
    "HybridParallelPlugin": "colossal._src.booster.plugin",
    "LowLevelZeroPlugin": "colossal._src.booster.plugin",
    "Plugin": "colossal._src.booster.plugin",
    "StepPlan": "colossal._src.booster.plugin",
    "TorchDDPPlugin": "colossal._src.booster.plugin",
    "TorchFSDPPlugin": "colossal._src.booster.plugin",
    "plan_step": "colossal._src.booster.plugin",
    "wrap_parts": "colossal._src.booster.plugin",
}

__all__ = [
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "StepPlan",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "plan_step",
    "wrap_parts",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal.booster.plugin' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
