"""What a library offers: its public modules and the names that they declare, read without importing anything."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Library:
    """A package in a source tree."""

    # A module is public unless a part of its path begins with an underscore. It offers what its literal `__all__`
    # says; a module right under the package that has none offers the classes and functions that it defines.

    root: Path  # the root of the project, which paths are shown relative to
    folder: Path  # the package's folder, `src/colossal` in a project called colossal

    @property
    def package(self) -> str:
        """The name by which the package is imported."""
        return self.folder.name

    @cached_property
    def files(self) -> dict[str, Path]:
        """Every module, private ones included, and its file."""
        return {self._module_name(path): path for path in sorted(self.folder.rglob("*.py"))}

    @cached_property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """The public modules, each with the names that it offers."""
        found = {}
        for module, path in self.files.items():
            if not any(part.startswith("_") for part in module.split(".")):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                names = _declared_names(tree)
                if names is None and path.parent == self.folder and path.name != "__init__.py":
                    names = tuple(_defined_names(tree))
                if names is not None:
                    found[module] = names
        return found

    def relative_path(self, path: Path) -> str:
        """The path as it is written in the reference."""
        return path.resolve().relative_to(self.root.resolve()).as_posix()

    def owns(self, module: str) -> bool:
        """Whether a module belongs to the package."""
        return module == self.package or module.startswith(f"{self.package}.")

    def _module_name(self, path: Path) -> str:
        parts = path.relative_to(self.folder).with_suffix("").parts
        return ".".join((self.package, *(part for part in parts if part != "__init__")))


def _declared_names(tree: ast.Module) -> tuple[str, ...] | None:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if value and any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return tuple(ast.literal_eval(value))
    return None


def _defined_names(tree: ast.Module) -> Iterator[str]:
    return (node.name for node in tree.body if isinstance(node, _DEFINITIONS) and not node.name.startswith("_"))
