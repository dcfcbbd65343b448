"""Recipes of parallelism for `Booster`. The names are loaded when they are first used: a program needs one of them."""

from typing import TYPE_CHECKING

from colossal._src.booster import plugin as _plugin

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
    if name not in __all__:
        raise AttributeError(f"module 'colossal.booster.plugin' has no attribute {name!r}")
    return getattr(_plugin, name)


def __dir__() -> list[str]:
    return sorted(__all__)
