"""States on disk: files of tensors, read and written past the operating system's cache while training goes on.

The names are loaded when they are first used: most programs keep nothing on disk.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal._src.offload.direct_io import DirectIO
    from colossal._src.offload.scratch_file import FileBackedBuffer
    from colossal._src.offload.state_store import StateStore
    from colossal._src.offload.tensor_file import FileRequest, TensorFile

_MODULE_OF = {
    "DirectIO": "colossal._src.offload.direct_io",
    "FileBackedBuffer": "colossal._src.offload.scratch_file",
    "FileRequest": "colossal._src.offload.tensor_file",
    "StateStore": "colossal._src.offload.state_store",
    "TensorFile": "colossal._src.offload.tensor_file",
}

__all__ = ["DirectIO", "FileBackedBuffer", "FileRequest", "StateStore", "TensorFile"]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal.offload' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
