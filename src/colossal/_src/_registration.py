"""Makes torch.distributed know the backend ``shm``, without importing torch for that.

If torch is there already, the backend is registered at once. If not, a finder waits until somebody imports
torch.distributed, registers the backend when that is done, and goes away.
"""

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register the backend now, or when torch.distributed comes."""
    module = sys.modules.get(_MODULE)
    if hasattr(module, "Backend"):
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: Any) -> None:
    backend = getattr(module, "Backend", None)  # a torch without distributed has none
    if backend is not None and "shm" not in backend.backend_list:
        backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, more: object = None) -> Any:
    from colossal._src.comm._shm import create

    return create(options, more)


class _Finder(MetaPathFinder):
    """Finds one module as everybody else would, and lets its loader register the backend afterwards."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _extend(spec.loader)
        return spec


def _extend(loader: Loader) -> None:
    execute: Callable[[ModuleType], None] = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        execute(module)
        _register(module)

    loader.exec_module = execute_and_register
