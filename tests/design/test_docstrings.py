"""Every module says what it is.

What public objects must say is checked where the reference is made: `tests/pagebuild/api`.
"""

import ast
from pathlib import Path

import pytest

GUARDED = ("src",)


def undocumented_modules(root: Path) -> list[str]:
    paths = sorted(root.rglob("*.py"))
    return [str(path.relative_to(root)) for path in paths if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]


@pytest.mark.parametrize("folder", GUARDED)
def test_every_module_says_what_it_is(folder: str, repository: Path) -> None:
    assert not undocumented_modules(repository / folder)


def test_finds_a_module_without_docstring(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "b.py").write_text('"""Say."""\n', encoding="utf-8")
    assert undocumented_modules(tmp_path) == ["a.py"]
