"""Registration hooks for the modules of one thread: torch calls its own for those of all, and a rank may be one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any, Literal

from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

Hook = Callable[[nn.Module, str, Any], None]
"""Is called with a module, and the name and value that are registered in it."""


class _Hooks(local):
    """The hooks of each thread."""

    def __init__(self) -> None:
        self.parameter: list[Hook] = []
        self.buffer: list[Hook] = []
        self.module: list[Hook] = []


_hooks = _Hooks()


def _call(kind: str, module: nn.Module, name: str, value: Any) -> None:
    for hook in getattr(_hooks, kind):
        hook(module, name, value)


# They stay: torch iterates over its hooks in every thread that builds, which fails if another adds or removes one.
register_module_parameter_registration_hook(partial(_call, "parameter"))
register_module_buffer_registration_hook(partial(_call, "buffer"))
register_module_module_registration_hook(partial(_call, "module"))


@contextmanager
def registration_hook(kind: Literal["parameter", "buffer", "module"], hook: Hook) -> Iterator[None]:
    """Call a hook for whatever this thread registers in modules."""
    hooks: list[Hook] = getattr(_hooks, kind)
    hooks.append(hook)
    try:
        yield
    finally:
        hooks.remove(hook)
