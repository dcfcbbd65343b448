"""The checks that pages use, as they were imported, to detect when a page replaces one. Imports no harness."""

import importlib
import operator
import os
import re
import sys
from builtins import all, map, next, zip  # noqa: A004, UP029 (a page may replace them in their module, not here)
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import BuiltinFunctionType, CoroutineType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

_CALLABLES = (FunctionType, BuiltinFunctionType, MethodType, type)
ALWAYS_TRUE = (*_CALLABLES, ModuleType, GeneratorType, CoroutineType, enumerate, filter, map, reversed, zip)

_COMPARISONS = r"assert\w*|allclose|array_equal|equal|isclose"
_TENSOR = rf"{_COMPARISONS}|__eq__|__ne__|__bool__|all|any|item"

# What proves a page: modules, or classes in them, and which of their names. The first ones are there from the start.
CHECKS = {
    "builtins": r"(?!__|open|input|print|breakpoint|help)[a-z]\w*|AssertionError",
    "math": "isclose",
    "sys": "exit|unraisablehook",
    "os": "_exit|abort|kill|killpg",
    "threading": "excepthook",
    "torch": _COMPARISONS,
    "torch:Tensor": _TENSOR,
    "torch.testing": _COMPARISONS,
    "torch.testing._comparison": r"[a-zA-Z]\w*",
    "numpy": _COMPARISONS,
    "numpy.testing": _COMPARISONS,
    "numpy.testing._private.utils": _COMPARISONS,
    "unittest.case:TestCase": r"assert\w*|fail\w*|_fail\w*|run",
    "colossal.testing": rf"{_COMPARISONS}|expect_error|SavedTensorCounter",
    "colossal._src.testing.asserts": r"assert\w*|_compare_full|_held_parameters",
    "colossal._src.testing.expected_error": "expect_error",
    "colossal._src.testing.saved_tensor_counter": "SavedTensorCounter",
    "colossal._src.testing.expected_error:_ExpectedError": "__enter__|__exit__",
    "colossal._src.testing.saved_tensor_counter:SavedTensorCounter": "__enter__|__exit__|_pack",
}
LOADED_AT_START = ("builtins", "math", "sys", "os", "threading")


class Checks:
    """The checks as they were when their modules were imported; to look at all of them takes a few microseconds."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, list[str], Callable[[Any], Any], tuple[Any, ...]]] = []

    def remember(self, module: ModuleType) -> None:
        """Remembers the checks of a module."""
        for place, names in CHECKS.items():
            module_name, _, owner_name = place.partition(":")
            if module_name == module.__name__:
                owner = getattr(module, owner_name) if owner_name else module
                found = [
                    name for name in filter(re.compile(names).fullmatch, dir(owner)) if callable(getattr(owner, name))
                ]
                paths = [*found, *(f"{name}.__code__" for name in found if hasattr(getattr(owner, name), "__code__"))]
                look = attrgetter("__name__", *paths)
                self._known.append((owner, paths, look, look(owner)[1:]))

    def remember_loaded(self) -> None:
        """Remembers the checks of the modules that are always loaded."""
        for name in LOADED_AT_START:
            self.remember(importlib.import_module(name))

    def find_replaced(self) -> str:
        """The first one that is not what it was; empty if all are."""
        for owner, paths, look, values in self._known:
            if not _are_same(look, owner, values):
                names = zip(paths, values, strict=True)
                changed = (
                    path for path, value in names if not _are_same(attrgetter("__name__", path), owner, (value,))
                )
                return f"{owner.__name__}.{next(changed, '').removesuffix('.__code__')}"
        return ""


def _are_same(look: Callable[[Any], Any], owner: Any, values: tuple[Any, ...]) -> bool:
    """Whether these are the very same objects, whatever they say of themselves."""
    try:
        return all(map(operator.is_, look(owner)[1:], values))
    except AttributeError:
        return False


class ImportHook:
    """Calls back when modules have been imported for the first time."""

    def __init__(self, watchers: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self.watchers = watchers

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds a watched module as usual, and looks at it once it is loaded."""
        if name not in self.watchers:
            return None
        watchers = self.watchers.pop(name)
        finders = [finder for finder in sys.meta_path if finder is not self]
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)
        if spec and spec.loader and not isinstance(spec.loader, type):  # a class loads what is built in
            execute = spec.loader.exec_module

            def execute_and_notify(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                sys.meta_path.insert(0, self)  # before a finder that the module has set
                for watcher in watchers:
                    watcher(module)

            spec.loader.exec_module = execute_and_notify
        return spec


def is_library_file(file: str) -> bool:
    """Whether a file of code belongs to neither the page nor the project."""
    return file.startswith(("<frozen", os.path.dirname(os.__file__))) or "-packages/" in file  # noqa: PTH120
