"""The exceptions that a function raises in its own text."""

import ast
import builtins
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from pagebuild.api.source import Function, Module

_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def raised_exceptions(node: Function, module: Module, owner: str = "") -> Iterator[tuple[type[BaseException], int]]:
    """The exceptions that stand behind `raise`, with their lines.

    `raise self._refusal()` counts as what `_refusal` says that it returns. What cannot be told from the text, such as
    `raise error`, is left out; so are the functions inside this one.

    Args:
        node: The function.
        module: The module that it stands in.
        owner: The class that it belongs to.
    """
    for statement in _own_statements(node):
        if isinstance(statement, ast.Raise) and statement.exc is not None:
            called = isinstance(statement.exc, ast.Call)
            expression = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
            kind = exception_named(ast.unparse(expression), module.name)
            if kind is None and called:
                kind = _returned_exception(expression, module, owner)
            if kind is not None:
                yield kind, statement.lineno


def exception_named(name: str, module: str) -> type[BaseException] | None:
    """The exception class that a name stands for in a module, as a builtin, or as a full dotted name."""
    head, *rest = name.split(".")
    for space in (vars(import_module(module)), vars(builtins)):
        found = _resolve_attribute(space, head, rest)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    home, _, last = name.rpartition(".")
    try:
        found = getattr(import_module(home), last, None) if home else None
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _resolve_attribute(space: Mapping[str, Any], head: str, rest: list[str]) -> Any:
    found = space.get(head)
    for part in rest:
        found = getattr(found, part, None)
    return found


def _returned_exception(expression: ast.expr, module: Module, owner: str) -> type[BaseException] | None:
    """The exception that a function of this module or class is annotated to return."""
    name = ast.unparse(expression)
    function = module.find(name.replace("self.", f"{owner}.", 1) if owner else name)
    annotation = module.annotation_source(function.returns) if isinstance(function, Function) else None
    return exception_named(annotation, module.name) if annotation else None


def _own_statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _INNER):
            yield child
            yield from _own_statements(child)
