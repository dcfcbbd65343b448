"""The public names of every package, compared with a snapshot, so that no name comes or goes unnoticed.

A package is public unless a part of its path begins with an underscore. It names what it offers in a literal
``__all__``. A module counts if it has an ``__all__``; a module right under the library counts in any case, with the
classes and functions that it defines. The names of the older API, which it only takes over, are recorded apart.

To accept a change: ``python tests/design/test_public_names.py`` writes the snapshot anew. Review the difference.
"""

import ast
import difflib
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

SNAPSHOT = Path(__file__).with_name("public_names.txt")
LEGACY_SNAPSHOT = Path(__file__).with_name("legacy_names.txt")
LEGACY = ("colossal.legacy:", "colossal.legacy.")
LIBRARY = Path(__file__).resolve().parents[2] / "src" / "colossal"
HOW_TO_UPDATE = "If the change is meant, run: python tests/design/test_public_names.py"


def dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("colossal", *(part for part in parts if part != "__init__")))


def declared_names(tree: ast.Module) -> list[str] | None:
    """The literal ``__all__`` of a module, None where there is none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))  # type: ignore[union-attr]
    return None


def defined_names(tree: ast.Module) -> list[str]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def public_modules(root: Path) -> dict[str, list[str] | None]:
    """The names of every public module; None for a package that does not declare them."""
    found: dict[str, list[str] | None] = {}
    for path in sorted(root.rglob("*.py")):
        module, is_package = dotted(path, root), path.name == "__init__.py"
        if any(part.startswith("_") for part in module.split(".")):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = declared_names(tree)
        if names is None and not is_package and path.parent == root:
            names = defined_names(tree)
        if names is not None or is_package:
            found[module] = names
    return found


def snapshot_of(root: Path) -> list[str]:
    return sorted(f"{module}: {name}" for module, names in public_modules(root).items() for name in names or ())


def snapshots_of(root: Path) -> dict[Path, list[str]]:
    names = snapshot_of(root)
    legacy = [name for name in names if name.startswith(LEGACY)]
    return {SNAPSHOT: [name for name in names if name not in legacy], LEGACY_SNAPSHOT: legacy}


def difference(recorded: list[str], found: list[str]) -> str:
    return "\n".join(difflib.unified_diff(recorded, found, "recorded", "found", n=0, lineterm=""))


def unresolved(module: str, names: list[str]) -> Iterator[str]:
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        yield f"{module} cannot be imported: {error}"
        return
    for name in names:
        try:
            getattr(loaded, name)
        except (AttributeError, ImportError) as error:
            yield f"{module}.{name} is declared but missing: {error}"


# ------------------------------------------------------------------------------------------ the library


def test_the_public_names_are_the_recorded_ones() -> None:
    for snapshot, names in snapshots_of(LIBRARY).items():
        changes = difference(snapshot.read_text(encoding="utf-8").splitlines(), names)
        assert not changes, f"{changes}\n{HOW_TO_UPDATE}"


def test_every_public_package_declares_its_names() -> None:
    silent = [module for module, names in public_modules(LIBRARY).items() if names is None]
    assert not silent, f"without __all__: {silent}"


@pytest.mark.parametrize(("module", "names"), [(m, n) for m, n in public_modules(LIBRARY).items() if n])
def test_every_declared_name_exists_once(module: str, names: list[str]) -> None:
    assert len(names) == len(set(names))
    missing = list(unresolved(module, names))
    assert not missing, "\n".join(missing)


# ------------------------------------------------------------------------------------------ the guard itself


def test_reads_names_without_importing(tmp_path: Path) -> None:
    files = {
        "__init__.py": "__all__ = ['b', 'a']\nraise SystemExit",
        "errors.py": "class Bad: ...\ndef _private(): ...\nasync def go(): ...\nimport os\n",
        "zero/__init__.py": "__all__: tuple[str, ...] = ('x',)",
        "zero/part.py": "class NotPublic: ...",
        "zero/open.py": "__all__ = ['y']",
        "silent/__init__.py": "from a import b",
        "zero/_inner/__init__.py": "__all__ = ['hidden']",
        "_typing.py": "class Hidden: ...",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    assert snapshot_of(tmp_path) == [
        "colossal.errors: Bad",
        "colossal.errors: go",
        "colossal.zero.open: y",
        "colossal.zero: x",
        "colossal: a",
        "colossal: b",
    ]
    assert [module for module, names in public_modules(tmp_path).items() if names is None] == ["colossal.silent"]


def test_shows_what_came_and_what_went() -> None:
    changes = difference(["colossal: a", "colossal: b"], ["colossal: b", "colossal: c"]).splitlines()
    assert "-colossal: a" in changes
    assert "+colossal: c" in changes
    assert not difference(["colossal: a"], ["colossal: a"])


def test_finds_a_name_that_does_not_exist() -> None:
    assert not list(unresolved("json", ["dumps"]))
    assert len(list(unresolved("json", ["dumps", "no_such_name"]))) == 1
    assert len(list(unresolved("no_such_module_at_all", ["x", "y"]))) == 1


if __name__ == "__main__":
    for path, recorded in snapshots_of(LIBRARY).items():
        path.write_text("\n".join(recorded) + "\n", encoding="utf-8")
