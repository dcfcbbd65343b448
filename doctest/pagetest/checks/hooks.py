"""Hooks: whether the objects that a page shows exist, found in the sources without importing them."""

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from pagetest.finding import Finding
from pagetest.graph.imports import ImportGraph, read_references
from pagetest.graph.references import References
from pagetest.model.page import Page


@dataclass(frozen=True)
class _Scope:
    """A module or a class: the statements that give it names, and the file they stand in."""

    name: str
    body: list[ast.stmt]
    module: str
    code: References
    bases: tuple[ast.expr, ...] = ()


@dataclass(frozen=True)
class HookChecker:
    """Checks hooks."""

    graph: ImportGraph

    def faults(self, page: Page) -> Iterator[Finding]:
        """The hooks of a page that lead to nothing."""
        for hook in page.hooks:
            if message := self.fault(hook.text):
                yield Finding(page.path, hook.line, f"the hook shows `{hook.text}`, but {message}: correct it")

    def fault(self, name: str) -> str:
        """Why there is no such object; empty if there is one."""
        return self._fault(name, frozenset())

    def _fault(self, name: str, seen: frozenset[str]) -> str:
        parts = name.split(".")
        length = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self.graph.files), 0)
        if not length or name in seen:
            return f"{name if seen else parts[0]} is not defined in {self.graph.source.name}/"
        module = ".".join(parts[:length])
        path = self.graph.files[module]
        code = read_references(path, module if path.name == "__init__.py" else module.rpartition(".")[0])
        scope = _Scope(module, code.tree.body, module, code)
        return self._why_missing(scope, parts[length:], seen | {name}) if parts[length:] else ""

    def _why_missing(self, scope: _Scope, names: list[str], seen: frozenset[str]) -> str:
        """Why the names do not lead to an object in the scope."""
        first, *rest = names
        known = dict(_bound_names(scope.body, scope.code))
        lazy = _lazy_names(scope)
        found = known.get(first) or lazy.get(first)
        if isinstance(found, str):
            return self._fault(".".join([found, *rest]), seen)
        if isinstance(found, ast.ClassDef) and rest:
            inner = _Scope(f"{scope.name}.{first}", found.body, scope.module, scope.code, tuple(found.bases))
            return self._why_missing(inner, rest, seen)
        if found and rest:
            other = getattr(found, "value", None)  # of an assignment, which may give a class a second name
            known_as = _full_name(other, scope) if isinstance(other, ast.Name | ast.Attribute) else ""
            return (
                self._fault(".".join([known_as, *rest]), seen) if known_as else f"{scope.name}.{first} has no members"
            )
        if found:
            return ""
        if any(not self._fault(".".join([base, *names]), seen) for base in _bases(scope)):
            return ""
        close = difflib.get_close_matches(first, [*known, *lazy, *self._submodules(scope)], n=1)
        return f"{scope.name} has no {first}" + (f", the nearest is {close[0]}" if close else "")

    def _submodules(self, scope: _Scope) -> Iterator[str]:
        start = f"{scope.name}."
        return (name.removeprefix(start) for name in self.graph.files if name.startswith(start))


def _lazy_names(scope: _Scope) -> dict[str, str]:
    """The full names of a module's lazy names; the table has a module or `module:name` for each, maybe relative."""
    modules = (scope.code.lazy_names or {}) if scope.name == scope.module else {}
    found = {}
    for name, location in modules.items():
        plain = location.lstrip(".")
        module = scope.code.absolute(plain.replace(":", "."), len(location) - len(plain))
        found[name] = module if ":" in plain else f"{module}.{name}"
    return found


def _bases(scope: _Scope) -> Iterator[str]:
    return (_full_name(base.value if isinstance(base, ast.Subscript) else base, scope) for base in scope.bases)


def _full_name(node: ast.expr, scope: _Scope) -> str:
    """The full name of what a dotted name in a module stands for."""
    head, *rest = ast.unparse(node).split(".")
    found = dict(_bound_names(scope.code.tree.body, scope.code)).get(head)
    return ".".join([found if isinstance(found, str) else f"{scope.module}.{head}", *rest])


def _bound_names(body: list[ast.stmt], code: References) -> Iterator[tuple[str, ast.stmt | str]]:
    """The names that statements bind, each with its definition, or with the full name of what is imported."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (head, head)
        elif isinstance(node, ast.ImportFrom):
            base = code.absolute(node.module or "", node.level)
            yield from ((alias.asname or alias.name, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                (part.id, node) for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
            )
        else:
            yield from _bound_names(list(_reachable_statements(node)), code)


def _reachable_statements(node: ast.stmt) -> Iterator[ast.stmt]:
    """The statements of a branch that can run, which is none under TYPE_CHECKING."""
    parts = [node, *getattr(node, "handlers", [])]
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        parts = []
    for part in parts:
        yield from getattr(part, "body", [])
    for name in ("orelse", "finalbody"):
        yield from getattr(node, name, [])
