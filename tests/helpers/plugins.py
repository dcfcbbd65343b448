"""Plugins by the names that cases of tests have; those that cast by default train in float32 here."""

from collections.abc import Callable
from functools import partial
from typing import Any

from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

HYBRID = partial(HybridParallelPlugin, precision="fp32")
_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "none": lambda: None,
    "DDP": TorchDDPPlugin,
    "FSDP": TorchFSDPPlugin,
    "ZeRO-1": partial(LowLevelZeroPlugin, precision="fp32"),
    "ZeRO-2": partial(LowLevelZeroPlugin, precision="fp32", stage=2),
    "Gemini": partial(GeminiPlugin, precision="fp32"),
    "Gemini, tp2": partial(GeminiPlugin, precision="fp32", tp_size=2),
    "Hybrid": partial(HYBRID, 1, 1),
    "Hybrid with ZeRO-1": partial(HYBRID, 1, 1, zero_stage=1),
    "tp2": partial(HYBRID, 2, 1),
    "pp2": partial(HYBRID, 1, 2, num_microbatches=2),
    "tp2 pp2": partial(HYBRID, 2, 2, num_microbatches=2),
}


def plugins(*names: str) -> dict[str, Callable[..., Any]]:
    """Return constructors by name, in this order; a case named "none" trains without a plugin.

    Args:
        names: Those of any number of ranks; "Gemini, tp2", "tp2" and "pp2" take an even one, "tp2 pp2" one of 4.
    """
    return {name: _CONSTRUCTORS[name] for name in names}
