"""Knows the checks that pages use as they were imported, to see when a page replaces one. It stands alone."""

import importlib
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
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
    "colossal.testing": _COMPARISONS,
    "colossal.testing.asserts": _COMPARISONS,
}
PRESENT = ("builtins", "math", "sys", "os", "threading")


class Checks:
    """The checks as they were when their modules were imported."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, str, Any, Any]] = []

    def learn(self, module: ModuleType) -> None:
        """Remembers what a module has of the table."""
        for place, names in CHECKS.items():
            home, _, owner_name = place.partition(":")
            if home == module.__name__:
                owner = getattr(module, owner_name) if owner_name else module
                for name in filter(re.compile(names).fullmatch, dir(owner)):
                    value = getattr(owner, name)
                    if callable(value):
                        self._known.append((owner, name, value, _code_of(value)))

    def learn_present(self) -> None:
        """Remembers what is there from the start."""
        for name in PRESENT:
            self.learn(importlib.import_module(name))

    def replaced(self) -> str:
        """The first one that is not what it was; empty if all are."""
        for owner, name, value, code in self._known:
            now = getattr(owner, name, None)
            if now is not value or (code and _code_of(now) is not code):
                return f"{owner.__name__}.{name}"
        return ""


def _code_of(value: Any) -> Any:
    return getattr(value, "__code__", None)


class ImportWatch:
    """Calls back when modules have been imported for the first time.

    Args:
        watchers: What is called with which module.
    """

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

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                for watcher in watchers:
                    watcher(module)

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def is_of_libraries(file: str) -> bool:
    """Whether a file of code belongs to neither the page nor the project."""
    return file.startswith(("<frozen", os.path.dirname(os.__file__))) or "-packages/" in file  # noqa: PTH120
