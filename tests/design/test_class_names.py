"""A class name stands for one class: who searches for it, or reads it in a traceback, finds one place."""

import ast
from collections.abc import Iterator
from pathlib import Path


def repeated_classes(root: Path) -> Iterator[str]:
    """Each name that classes of several modules have, private ones included, with the modules."""
    homes: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path.relative_to(root).as_posix())
    for name, places in homes.items():
        if len(places) > 1:
            yield f"{name} is a class of {' and of '.join(places)}: give each a name that says what it alone is"


def test_class_names_are_unique(library: Path) -> None:
    violations = list(repeated_classes(library))
    assert not violations, "\n".join(violations)


def test_finds_a_repeated_class(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Header: ...\nclass Own: ...\n", encoding="utf-8")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.py").write_text(
        "@final\nclass Header: ...\nclass Outer:\n    class Own: ...\n", encoding="utf-8"
    )
    [violation] = repeated_classes(tmp_path)
    assert violation.startswith("Header is a class of a.py and of b/c.py")
