"""Rest: what a run needs to go on later, in files that Hugging Face and plain PyTorch read as well."""

import importlib
from typing import TYPE_CHECKING

from colossal._src.checkpoint_io.api import CheckpointIO, GeneralCheckpointIO
from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup, ProcessGroupIO, SingleProcessIO
from colossal._src.checkpoint_io.checkpoint_manager import CheckpointManager
from colossal._src.checkpoint_io.index_and_names import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILES,
    CheckpointIndexFile,
    full_path,
)
from colossal._src.checkpoint_io.source import read_torch, write_torch
from colossal._src.checkpoint_io.staging import Staging, prepare_directory

if TYPE_CHECKING:
    from colossal._src.checkpoint_io.adapter_directory import adapter_tree

_MODULE_OF = {
    "adapter_tree": "colossal._src.checkpoint_io.adapter_directory",
}  # which few programs need

__all__ = [
    "ADAPTER_CONFIG_FILE",
    "ADAPTER_WEIGHTS_FILES",
    "CheckpointGroup",
    "CheckpointIO",
    "CheckpointIndexFile",
    "CheckpointManager",
    "GeneralCheckpointIO",
    "ProcessGroupIO",
    "SingleProcessIO",
    "Staging",
    "adapter_tree",
    "full_path",
    "prepare_directory",
    "read_torch",
    "write_torch",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal._src.checkpoint_io' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
