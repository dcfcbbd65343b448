"""colossal: large-scale PyTorch training whose tutorials run and prove themselves.

The public names below are loaded when they are first used, so that ``import colossal`` costs almost nothing.
"""

import importlib
import os
from typing import TYPE_CHECKING

from colossal._src._older_names import find_older_names, get_older_name
from colossal._src._registration import register

if TYPE_CHECKING:
    from colossal._src.booster import Booster
    from colossal._src.cluster import (
        ParallelMesh,
        get_default_parser,
        launch,
        launch_from_openmpi,
        launch_from_slurm,
        launch_from_torch,
    )

__version__ = "0.1.0.dev0"
"""The version of the library."""

_MODULES = {
    "Booster": "colossal.booster",
    "ParallelMesh": "colossal.cluster",
    "get_default_parser": "colossal.cluster",
    "launch": "colossal.cluster",
    "launch_from_openmpi": "colossal.cluster",
    "launch_from_slurm": "colossal.cluster",
    "launch_from_torch": "colossal.cluster",
}

_SUBMODULES = {
    "accelerator",
    "amp",
    "booster",
    "checkpoint_io",
    "cluster",
    "comm",
    "errors",
    "inference",
    "interface",
    "kernel",
    "lazy",
    "legacy",
    "logging",
    "nn",
    "offload",
    "pipeline",
    "shardformer",
    "tensor",
    "testing",
    "zero",
}  # `import colossal` is enough for `colossal.nn.Linear`

__all__ = [
    "Booster",
    "ParallelMesh",
    "__version__",
    "get_default_parser",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

os.environ.setdefault(
    "THP_MEM_ALLOC_ENABLE", "1"
)  # set before torch allocates a tensor: it then backs large ones by huge pages
register()
find_older_names("colossal._src.legacy.paths")


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"colossal.{name}")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    return get_older_name(__name__, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
