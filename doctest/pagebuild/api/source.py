"""The source of a library as syntax trees: where a name is defined, and how it was written there."""

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function | ast.Assign | ast.AnnAssign

_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """The text of a module and its tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    def annotation_source(self, annotation: ast.expr | None) -> str | None:
        """An annotation as it stands in the source; a quoted one without its quotes."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return annotation.value
        return None if annotation is None else self.expression_source(annotation)

    def expression_source(self, node: ast.expr) -> str:
        """An expression as it stands in the source, on one line."""
        lines = self._lines[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return " ".join(b"\n".join(lines).decode().split())

    @cached_property
    def _lines(self) -> list[bytes]:
        """The lines as bytes, the unit of column offsets; `ast` would split the text again for each node."""
        return [line.encode() for line in self.text.split("\n")]

    def find(self, qualname: str) -> Definition | None:
        """The statement that defines a name: `Booster`, `Booster.boost`, `AXES`."""
        node: ast.AST | None = self.tree
        for part in qualname.split("."):
            node = next((found for found in _definitions(node) if part in _names(found)), None) if node else None
        return node if isinstance(node, Definition) else None

    def import_origin(self, name: str) -> tuple[str, str] | None:
        """The module and the name that an import at the top of this one binds the name to."""
        return self._origins.get(name)

    @cached_property
    def _origins(self) -> dict[str, tuple[str, str]]:
        """What each imported name stands for; the outermost import of a name counts."""
        found: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, (node.module, alias.name))
        return found

    def attribute_docstring(self, node: Definition) -> str:
        """The text below an assignment that documents it, empty where there is none."""
        parent = next((one for one in ast.walk(self.tree) if node in getattr(one, "body", ())), None)
        body: list[ast.stmt] = getattr(parent, "body", [])
        after = body[body.index(node) + 1 :][:1] if node in body else []
        for statement in after:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                return textwrap.dedent(str(statement.value.value)).strip()
        return ""


@dataclass(frozen=True)
class SourceModules:
    """The modules of a package."""

    package: str  # the name by which it is imported
    _modules: dict[str, Module] = field(default_factory=dict)

    def module(self, name: str) -> Module:
        """Reads a module; its file is found as an import would find it."""
        if name not in self._modules:
            spec = find_spec(name)
            assert spec is not None
            assert spec.origin is not None, f"{name} has no source file"
            text = Path(spec.origin).read_text(encoding="utf-8")
            self._modules[name] = Module(name, Path(spec.origin), text, ast.parse(text))
        return self._modules[name]

    def find(self, module: str, qualname: str) -> Definition | None:
        """The statement of a module that defines a name."""
        return self.module(module).find(qualname)

    def assigning_module(self, module: str, name: str) -> tuple[str, str]:
        """The module of the package that assigns a name which this one may only import, and its spelling there."""
        while self.find(module, name) is None:
            origin = self.module(module).import_origin(name)
            if origin is None or origin[0].partition(".")[0] != self.package:
                break
            module, name = origin
        return module, name


def first_line(node: Definition) -> int:
    """The line on which a definition starts, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def decorators(node: ast.AST | None) -> list[str]:
    """The last names of a definition's decorators: `final` for `@typing.final`."""
    found = (one.func if isinstance(one, ast.Call) else one for one in getattr(node, "decorator_list", []))
    return [one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in found]


def _definitions(node: ast.AST) -> Iterator[Definition]:
    """The definitions of a body, conditional ones included, those of inner scopes and overloads left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            if "overload" not in decorators(child):
                yield child
        elif isinstance(child, (ast.If, ast.Try, ast.With)):
            yield from _definitions(child)


def _names(node: Definition) -> list[str]:
    if isinstance(node, _SCOPES):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]
