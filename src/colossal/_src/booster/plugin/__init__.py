"""Recipes of parallelism for `Booster`. The names are loaded when they are first used: a program needs one of them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal._src.booster.plugin.base import Plugin, wrap_parts
    from colossal._src.booster.plugin.dataloader import seed_worker
    from colossal._src.booster.plugin.ddp.torch_ddp import TorchDDPPlugin
    from colossal._src.booster.plugin.fsdp.torch_fsdp import TorchFSDPPlugin
    from colossal._src.booster.plugin.gemini.gemini_plugin import GeminiPlugin
    from colossal._src.booster.plugin.hybrid.hybrid_parallel import HybridParallelPlugin
    from colossal._src.booster.plugin.hybrid.step_plan import StepPlan, plan_step
    from colossal._src.booster.plugin.wrap_units import find_units
    from colossal._src.booster.plugin.zero.low_level_zero import LowLevelZeroPlugin

_MODULE_OF = {
    "GeminiPlugin": "colossal._src.booster.plugin.gemini.gemini_plugin",
    "HybridParallelPlugin": "colossal._src.booster.plugin.hybrid.hybrid_parallel",
    "LowLevelZeroPlugin": "colossal._src.booster.plugin.zero.low_level_zero",
    "Plugin": "colossal._src.booster.plugin.base",
    "StepPlan": "colossal._src.booster.plugin.hybrid.step_plan",
    "TorchDDPPlugin": "colossal._src.booster.plugin.ddp.torch_ddp",
    "TorchFSDPPlugin": "colossal._src.booster.plugin.fsdp.torch_fsdp",
    "find_units": "colossal._src.booster.plugin.wrap_units",
    "wrap_parts": "colossal._src.booster.plugin.base",
    "plan_step": "colossal._src.booster.plugin.hybrid.step_plan",
    "seed_worker": "colossal._src.booster.plugin.dataloader",
}

__all__ = [
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "StepPlan",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "find_units",
    "plan_step",
    "seed_worker",
    "wrap_parts",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal.booster.plugin' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
