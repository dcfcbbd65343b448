"""Recipes of parallelism for `Booster`. The names are loaded when they are first used: a program needs one of them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal.booster.plugin.base import Plugin
    from colossal.booster.plugin.ddp.torch_ddp import TorchDDPPlugin
    from colossal.booster.plugin.fsdp.torch_fsdp import TorchFSDPPlugin
    from colossal.booster.plugin.gemini.gemini_plugin import GeminiPlugin
    from colossal.booster.plugin.hybrid.hybrid_parallel import HybridParallelPlugin
    from colossal.booster.plugin.hybrid.step_plan import StepPlan, plan_step
    from colossal.booster.plugin.zero.low_level_zero import LowLevelZeroPlugin

_MODULE_OF = {
    "GeminiPlugin": "colossal.booster.plugin.gemini.gemini_plugin",
    "HybridParallelPlugin": "colossal.booster.plugin.hybrid.hybrid_parallel",
    "LowLevelZeroPlugin": "colossal.booster.plugin.zero.low_level_zero",
    "Plugin": "colossal.booster.plugin.base",
    "StepPlan": "colossal.booster.plugin.hybrid.step_plan",
    "TorchDDPPlugin": "colossal.booster.plugin.ddp.torch_ddp",
    "TorchFSDPPlugin": "colossal.booster.plugin.fsdp.torch_fsdp",
    "plan_step": "colossal.booster.plugin.hybrid.step_plan",
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
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal.booster.plugin' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
