"""Executes every public module: what it exports carries its name, and it finds what it had in older documentation.

The table of older names is read when a program asks for something that is not there, so that other programs do not pay
for it.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def find_older_names(paths: str) -> None:
    """Find older modules from now on; once more changes nothing.

    Args:
        paths: The module that reads the table of them; it is imported when it is first needed.
    """
    if not any(isinstance(finder, _OlderPathFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OlderPathFinder(paths))


def get_older_name(module: str, name: str) -> object:
    """What a module had under a name in the older documentation.

    Args:
        module: The absolute name of the module.
        name: The attribute.

    Returns:
        The object of today.

    Raises:
        AttributeError: There was no such name.
        ImportError: There was, and it has no counterpart; says what to use.
    """
    return _older_paths().get_older_name(module, name)


def _older_paths() -> Any:
    """The module that reads the table."""
    from pkgutil import resolve_name

    (finder,) = (each for each in sys.meta_path if isinstance(each, _OlderPathFinder))
    return resolve_name(finder.paths)


class _OlderPathFinder:
    """Finds a module of the package as everybody else would; if there is none, an older one."""

    def __init__(self, paths: str) -> None:
        self.paths = paths

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _: object = None) -> ModuleSpec | None:
        return _find(name, path) if name.startswith("colossal.") else None  # one line: all imports of a program run it


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    spec = PathFinder.find_spec(name, path)
    if name.startswith("colossal._src"):
        return spec
    if spec is None or spec.loader is None:
        return _older_paths().find_older_module(name)
    execute: Callable[[ModuleType], None] = spec.loader.exec_module
    spec.loader.exec_module = lambda module: _extend(module, execute)
    return spec


def _extend(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    """Execute a public module, and let it find the names and modules that it had in the older documentation."""
    execute(module)
    for name in module.__dict__.get("__all__", ()):
        if name in module.__dict__:
            _set_public_module(module.__name__, name, module.__dict__[name])
    own: Callable[[str], object] | None = module.__dict__.get("__getattr__")

    def load(name: str) -> object:
        if own is not None:
            with suppress(AttributeError):
                value = own(name)
                _set_public_module(module.__name__, name, value)
                return value
        return get_older_name(module.__name__, name)

    module.__dict__["__getattr__"] = load
    module.__dict__.setdefault("__path__", [])  # older modules may be inside, as in a package


def _set_public_module(module: str, name: str, value: Any) -> None:
    """Let a class or a function say the public module that exports it: pickles, logs and tracebacks show that."""
    # An alias would not lead back to the object, and who is public already stays where it is. Pickles that hold the
    # private module are read as before: it is still there.
    defined_in = getattr(value, "__module__", None) or ""
    if defined_in.startswith("colossal._src.") and getattr(value, "__qualname__", None) == name:
        value.__module__ = module
