"""Where the modules and names of the older documentation are today: one table, read when nothing else was found.

Modules that do not exist any more are made by `find_older_module`; modules that do exist take older names from
`get_older_name`. Both load what a row names when a program asks for it.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from colossal._src.legacy.path_table import PATHS
from colossal._src.legacy.refused_paths import WITHOUT_COUNTERPART

_SAME = "*"  # every public name of the target, under its own name


def find_older_module(name: str) -> ModuleSpec | None:
    """The spec of a module of the older documentation, None if it has no such module.

    Args:
        name: The absolute name, for example ``colossal.context``.

    Raises:
        ImportError: The module was documented and has no counterpart; says what to use.
    """
    if _is_module(name) or _is_module(_before_move(name)):
        return ModuleSpec(name, _OlderLoader(), is_package=True)
    return _refuse(name)


def get_older_name(module: str, name: str) -> object:
    """What a module had under a name in the older documentation.

    Args:
        module: The absolute name of the module, of today or older.
        name: The attribute.

    Returns:
        The object of today.

    Raises:
        AttributeError: There was no such name.
        ImportError: There was, and it has no counterpart; says what to use.
    """
    if not name.startswith("__"):
        for target, attribute in _targets(module, name):
            return _remember(module, name, getattr(importlib.import_module(target), attribute))
        path, moved_from = f"{module}.{name}", _before_move(module)
        if path in PATHS or _has_children(path) or _is_module(_before_move(path)):
            return importlib.import_module(path)
        _refuse(path)
        if moved_from != module and _is_module(moved_from):
            return getattr(importlib.import_module(moved_from), name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules.get(module))


def names_of(module: str) -> list[str]:
    """The older names of a module, sorted."""
    names: set[str] = set()
    for target, listed in (PATHS.get(module) or PATHS.get(_before_move(module), {})).items():
        for entry in listed.split():
            names.update(importlib.import_module(target).__all__ if entry == _SAME else [entry.partition("=")[0]])
    return sorted(names)


def _targets(module: str, name: str) -> Iterator[tuple[str, str]]:
    """The module and the attribute of today that a row gives for a name."""
    for target, listed in PATHS.get(module, {}).items():
        for entry in listed.split():
            older, _, newer = entry.partition("=")
            if older == name or (entry == _SAME and name in importlib.import_module(target).__all__):
                yield target, newer or name


def _before_move(path: str) -> str:
    """Where a path was before a release moved the older modules into ``colossal.legacy``; others are as they are."""
    return path.replace("colossal.legacy.", "colossal.", 1)


def _is_module(path: str) -> bool:
    """Whether the table has a module, or modules inside of it."""
    return path in PATHS or any(each.startswith(f"{path}.") for each in PATHS)


def _has_children(module: str) -> bool:
    return any(path.startswith(f"{module}.") for path in (*PATHS, *WITHOUT_COUNTERPART))


def _remember(module: str, name: str, value: object) -> object:
    if module in sys.modules:
        sys.modules[module].__dict__[name] = value
    return value


def _refuse(path: str) -> None:
    """Raise if a path, or one above it, was documented and has no counterpart."""
    for documented, advice in WITHOUT_COUNTERPART.items():
        if any(f"{each}.".startswith(f"{documented}.") for each in (path, _before_move(path))):
            raise ImportError(f"{path} has no counterpart here. {advice}", name=path)


class _OlderLoader(Loader):
    """Fills a module with nothing but the way to its names."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        parent, _, leaf = spec.name.rpartition(".")
        package = sys.modules.get(parent)
        # as long as the import has not put the module in its place
        function = getattr(package, leaf) if leaf in getattr(package, "__all__", ()) else None
        if function is None and not any(_targets(parent, leaf)):
            return ModuleType(spec.name)
        module = _CallableModule(spec.name)
        module.function = function
        return module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"The names that the older documentation has in `{name}`."

        def load(attribute: str) -> object:
            if attribute == "__all__":
                return names_of(name)
            return get_older_name(name, attribute)

        def listing() -> Sequence[str]:
            return names_of(name)

        module.__dict__.update(__getattr__=load, __dir__=listing)


class _CallableModule(ModuleType):
    """A module and a function of the same name, whose place in the package it takes: a call goes to the function."""

    function: Any = None  # that of a module of today; else that of the table

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is not None:
            return self.function(*args, **kwargs)
        parent, _, leaf = self.__name__.rpartition(".")
        ((target, attribute), *_) = _targets(parent, leaf)
        return getattr(importlib.import_module(target), attribute)(*args, **kwargs)
