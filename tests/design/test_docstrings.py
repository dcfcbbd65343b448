"""Every public class and function is documented, and every public class shows how it is used.

Exceptions need no example: nobody writes them, everybody reads them. Neither do names that are only re-exported from
another library.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "src" / "colossal"
EXAMPLE = re.compile(r"^Examples?::?$", re.MULTILINE)


def own_docstring(item: type | object) -> str:
    """The docstring written for ``item`` itself: not inherited, not made up by ``dataclass``."""
    text = (item.__dict__.get("__doc__") if isinstance(item, type) else item.__doc__) or ""
    made_up = isinstance(item, type) and text.startswith(f"{item.__name__}(")
    return "" if made_up else inspect.cleandoc(text)


def public_names(module: ModuleType) -> list[str]:
    """What ``__all__`` says, or else what the module itself defines without a leading underscore."""
    defined = [name for name, item in vars(module).items() if getattr(item, "__module__", None) == module.__name__]
    return getattr(module, "__all__", [name for name in defined if not name.startswith("_")])


def violations(module: ModuleType, package: str = "colossal") -> Iterator[str]:
    for name in public_names(module):
        item = getattr(module, name)
        is_class = isinstance(item, type)
        if not (is_class or inspect.isroutine(item)) or item.__module__.split(".")[0] != package:
            continue
        text = own_docstring(item)
        if not text:
            yield f"{module.__name__}.{name} has no docstring"
        elif is_class and not issubclass(item, BaseException) and not EXAMPLE.search(text):
            yield f"{module.__name__}.{name} has no Example section"


def public_modules(root: Path) -> list[str]:
    """The modules whose source assigns ``__all__``, and the ones right under the library."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = [part for part in path.relative_to(root).with_suffix("").parts if part != "__init__"]
        is_public = path.parent == root or "\n__all__" in path.read_text(encoding="utf-8")
        if is_public and not any(part.startswith("_") for part in parts):
            found.append(".".join(("colossal", *parts)))
    return found


def undocumented_modules(root: Path) -> list[str]:
    paths = sorted(root.rglob("*.py"))
    return [str(path.relative_to(root)) for path in paths if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]


# ------------------------------------------------------------------------------------------ the library


@pytest.mark.parametrize("name", public_modules(LIBRARY))
def test_every_public_name_is_documented(name: str) -> None:
    found = list(violations(importlib.import_module(name)))
    assert not found, "\n".join(found)


def test_every_module_says_what_it_is() -> None:
    assert not undocumented_modules(LIBRARY)


# ------------------------------------------------------------------------------------------ the guard itself

GOOD = '''
class Shown:
    """Say.

    Example:
        >>> Shown()
    """
class Bad(Exception):
    """Say."""
def f():
    """Say."""
NUMBER = 3
from json import JSONDecoder, dumps
'''
FAULTS = {
    "a function without docstring": "def f(): ...",
    "a class without docstring": "class A: ...",
    "a class without example": 'class A:\n    """Say what an Example: is."""',
    "an inherited docstring": "class A(Shown): ...",
    "an exception without docstring": "class A(Bad): ...",
    "a made-up docstring": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 0",
}


def module_of(source: str, names: list[str]) -> ModuleType:
    module = ModuleType("colossal.made")
    exec(compile(source, "made", "exec"), vars(module))  # noqa: S102
    vars(module)["__all__"] = names
    return module


def test_lets_documented_names_pass() -> None:
    assert not list(violations(module_of(GOOD, ["Shown", "Bad", "f", "NUMBER", "JSONDecoder", "dumps"])))


@pytest.mark.parametrize("fault", FAULTS)
def test_finds_a_name_without_documentation(fault: str) -> None:
    source = FAULTS[fault]
    [violation] = violations(module_of(GOOD + source, ["f" if "def f" in source else "A"]))
    assert "colossal.made" in violation


def test_finds_a_module_without_docstring(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "b.py").write_text('"""Say."""\n', encoding="utf-8")
    assert undocumented_modules(tmp_path) == ["a.py"]


def test_knows_the_modules_to_look_at(tmp_path: Path) -> None:
    for name in ("__init__.py", "a.py", "_b.py", "c/__init__.py", "c/_d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('"""Say."""\n__all__ = []\n', encoding="utf-8")
    (tmp_path / "d.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "c" / "e.py").write_text("x = 1\n", encoding="utf-8")
    assert public_modules(tmp_path) == ["colossal", "colossal.a", "colossal.c", "colossal.d"]


def test_a_module_without_all_is_judged_by_what_it_defines() -> None:
    module = module_of(f"__name__ = 'colossal.made'\n{GOOD}def g(): ...\ndef _h(): ...\n", [])
    del vars(module)["__all__"]
    assert list(violations(module)) == ["colossal.made.g has no docstring"]
