"""The public names of the library, as its sources declare them.

``python tests/helpers/public_names.py [REVISION]`` prints what came and what went since a commit (HEAD).
"""

import ast
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[2] / "src" / "colossal"
LEGACY = ("colossal.legacy:", "colossal.legacy.")


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


def names_of(root: Path) -> list[str]:
    return sorted(f"{module}: {name}" for module, names in public_modules(root).items() for name in names or ())


def names_without_legacy() -> list[str]:
    """The names of the library that the older API does not take over."""
    return [name for name in names_of(LIBRARY) if not name.startswith(LEGACY)]


def difference(before: list[str], found: list[str]) -> str:
    return "\n".join(difflib.unified_diff(before, found, "before", "now", n=0, lineterm=""))


def main(revision: str = "HEAD") -> None:
    """Print the difference to a commit."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision, "src/colossal"], cwd=LIBRARY.parents[1], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        before = names_of(Path(folder, "src", "colossal"))
    sys.stdout.write(difference(before, names_of(LIBRARY)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
