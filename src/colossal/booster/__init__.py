"""One set of verbs for training under any plugin."""

import importlib
from typing import TYPE_CHECKING

from colossal._src.booster import (
    Boosted,
    Booster,
    Capabilities,
    Executor,
    Parts,
)
from colossal.booster import mixed_precision as mixed_precision
from colossal.booster import plugin as plugin

if TYPE_CHECKING:
    from colossal._src.booster.lora import Lora

_MODULE_OF = {"Lora": "colossal._src.booster.lora"}  # which few programs need

__all__ = ["Boosted", "Booster", "Capabilities", "Executor", "Lora", "Parts"]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal.booster' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "mixed_precision", "plugin"})
