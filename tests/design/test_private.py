"""Private names stay in their module: what the library takes of others' is torch's, transformers' or Python's.

Ruff (SLF001) finds every access to a private name of another object. Where one is unavoidable, the line says so with a
``noqa``, whose reason stands there or beside another use of the name in the same file; and the name is no one of ours.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = re.compile(r"#\s*noqa: SLF001\s*(?P<reason>[(-].*)?")
OURS = re.compile(r"^_(?!_)")


def private_names(line: str) -> list[str]:
    """The private attributes in a line of code."""
    return re.findall(r"\.(_[a-zA-Z]\w*)", line.partition("#")[0])


def defined_in(source: str) -> set[str]:
    """Private attributes, methods and functions that a module defines."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if OURS.match(name)}


def violations(root: Path) -> Iterator[str]:
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    defined = {path: defined_in(source) for path, source in sources.items()}
    for path, source in sources.items():
        marked = [(number, line) for number, line in enumerate(source.splitlines(), 1) if MARK.search(line)]
        explained = {
            name
            for _, line in marked
            if (match := MARK.search(line)) and match["reason"]
            for name in private_names(line)
        }
        for number, line in marked:
            for name in private_names(line):
                place = f"{path.relative_to(root)}:{number}: {name}"
                if name not in explained:
                    yield f"{place} has no reason"
                others = [each for each in defined if each != path and name in defined[each]]
                if others and name not in defined[path] and name not in FOREIGN:
                    yield f"{place} is defined in {others[0].relative_to(root)}"


FOREIGN = {
    "_base",  # of torch's views of tensors
    "_metadata",  # of the state dicts that torch makes; ours keep it too
    "_parameters",  # of torch's modules
    "_values",  # of torch's sparse tensors
    "_version",  # of torch's tensors
}
"""Names of other libraries that one of ours is called as well."""


def test_private_names_of_others_are_those_of_other_libraries(library: Path) -> None:
    found = list(violations(library))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("print(plugin._options)  # noqa: SLF001 (beside its class)", "is defined in other.py"),
        ("print(tensor._base)  # noqa: SLF001", "has no reason"),
    ],
)
def test_a_violation_is_found(line: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("class Plugin:\n    def __init__(self):\n        self._options = 1\n")
    (tmp_path / "one.py").write_text(line + "\n")
    (found,) = violations(tmp_path)
    assert problem in found
