"""The references of a program: every dotted name that it imports or reaches through what it imports."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

EVERYTHING = "*"

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PROGRAM = re.compile(r"^\s*(?:from\s+([\w.]+)\s+import\s+\(?([\w, ]+)|import\s+([\w.]+))", re.MULTILINE)
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


@dataclass(frozen=True)
class References:
    """What a program refers to; none of it is executed."""

    tree: ast.Module
    package: str = ""  # the package against which relative imports are resolved; empty for a script

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes that can be executed: what stands under TYPE_CHECKING cannot."""
        return tuple(_executable_nodes(self.tree))

    @cached_property
    def imports(self) -> frozenset[str]:
        """The absolute dotted names in import statements and in `import_module` with a literal."""
        return frozenset(name for _, name in self._imported()) | frozenset(self._called())

    @cached_property
    def bindings(self) -> Mapping[str, frozenset[str]]:
        """What the names that imports bind stand for."""
        found: dict[str, set[str]] = {}
        for bound, name in self._imported():
            found.setdefault(bound or name.partition(".")[0], set()).add(name if bound else name.partition(".")[0])
        return {bound: frozenset(names) for bound, names in found.items()}

    @cached_property
    def names(self) -> frozenset[str]:
        """All dotted names; one that ends in `.*` means whatever the module offers."""
        called = {f"{name}.{EVERYTHING}" for name in self._called()}
        return self.imports | called | frozenset(self._used_names())

    @cached_property
    def is_dynamic(self) -> bool:
        """Whether it imports by a name that is only known when it runs, outside a module's `__getattr__`."""
        lazy = {id(node) for function in self._lazy() for node in ast.walk(function)}
        return any(id(call) not in lazy and not _literal_argument(call) for call in self._import_calls())

    @cached_property
    def strings(self) -> frozenset[str]:
        """Every string in it."""
        return frozenset(text for node in self.nodes if (text := _string_value(node)))

    @property
    def names_in_strings(self) -> Iterator[str]:
        """Dotted names in strings: a program that is written to a file, a module that is run by its name."""
        for text in self.strings:
            if _DOTTED.fullmatch(text):
                yield text
            for base, names, plain in _PROGRAM.findall(text):
                yield from (
                    [plain] if plain else [f"{base}.{name.split()[0]}" for name in names.split(",") if name.strip()]
                )

    @cached_property
    def defined_names(self) -> frozenset[str]:
        """The names that a module has once it is imported, classes and functions, variables and imported names."""
        names = set(self.bindings)
        for node in self.tree.body:
            if isinstance(node, _SCOPES):
                names.add(node.name)
            names |= {
                part.id for target in _assigned_names(node) for part in ast.walk(target) if isinstance(part, ast.Name)
            }
        return frozenset(names)

    @cached_property
    def lazy_names(self) -> Mapping[str, str] | None:
        """Where a module-level `__getattr__` finds names: name to location; None without such a function."""
        if not self._lazy():
            return None
        tables = [node.value for node in self.tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        rows = (zip(table.keys, table.values, strict=True) for table in tables if isinstance(table, ast.Dict))
        return {
            _string_value(name): _string_value(location)
            for table in rows
            for name, location in table
            if _string_value(name) and _string_value(location)
        }

    def absolute(self, name: str, level: int) -> str:
        """Makes a relative name absolute."""
        if not level:
            return name
        parts = self.package.split(".")
        return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])

    def _imported(self) -> Iterator[tuple[str, str]]:
        """The name that each import binds, empty where it is the first part, and what is imported."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.asname or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self.absolute(node.module or "", node.level)
                yield from ((alias.asname or alias.name, f"{base}.{alias.name}") for alias in node.names)

    def _import_calls(self) -> Iterator[ast.Call]:
        for node in self.nodes:
            if isinstance(node, ast.Call) and _last_part(node.func) in {"import_module", "__import__"}:
                yield node

    def _called(self) -> Iterator[str]:
        for call in self._import_calls():
            if name := _literal_argument(call):
                plain = name.lstrip(".")
                yield self.absolute(plain, len(name) - len(plain))

    def _used_names(self) -> Iterator[str]:
        """Attributes of imported names, and imported names that are passed on themselves."""
        heads = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        for node in self.nodes:
            if isinstance(node, ast.Attribute):
                root, attributes = _attribute_chain(node)
                yield from (".".join([name, *attributes]) for name in self.bindings.get(root, ()))
            elif isinstance(node, ast.Name) and id(node) not in heads:
                yield from (f"{name}.{EVERYTHING}" for name in self.bindings.get(node.id, ()))

    def _lazy(self) -> list[ast.FunctionDef]:
        return [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]


def _executable_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.If) and _last_part(node.test) == "TYPE_CHECKING":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _executable_nodes(child)


def _last_part(node: ast.expr) -> str:
    """The name of `name` and of `module.name`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _string_value(node: ast.AST | None) -> str:
    """The string that the node is; empty where it is none."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _literal_argument(call: ast.Call) -> str:
    return _string_value(call.args[0]) if call.args else ""


def _attribute_chain(node: ast.Attribute) -> tuple[str, list[str]]:
    """The name at the root of `root.a.b`, empty where it is no name, and the attributes."""
    attributes, value = [node.attr], node.value
    while isinstance(value, ast.Attribute):
        attributes.insert(0, value.attr)
        value = value.value
    return (value.id if isinstance(value, ast.Name) else ""), attributes


def _assigned_names(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []
