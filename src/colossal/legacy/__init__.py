"""The older documented API: config files, `Engine`, `Trainer`, `ColoTensor`; each name says what supersedes it."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal._src.legacy.engine import initialize

_MODULE_OF = {"initialize": "colossal._src.legacy.engine"}  # loaded when a program asks for it

__all__ = ["initialize"]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal.legacy' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
