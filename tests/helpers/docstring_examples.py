"""The examples in the docstrings of a module."""

import ast
import doctest
import inspect
from types import ModuleType


def find_examples(module: ModuleType) -> list[doctest.DocTest]:
    """One test for each docstring of a module, its classes and its functions.

    What counts is where the source defines an object. ``doctest`` asks an object for its module, and a public class
    says the one that exports it.
    """
    finder = doctest.DocTestFinder(recurse=False)
    found = finder.find(module)
    finder = doctest.DocTestFinder()
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{module.__name__}.{node.name}"
            found += finder.find(getattr(module, node.name, None), name, module=False, globs=vars(module).copy())
    return [test for test in found if "._member_type_" not in test.name]  # the class of an enumeration's values
