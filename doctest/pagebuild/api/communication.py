"""Which functions of a library communicate with other ranks, found in its source.

A function communicates if its text names a collective, or a function of the library that communicates. Methods are
followed through annotations: `self.plugin.configure(...)` is a call of every `configure` that a `Plugin` may have.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pagebuild.api.collective import GROUP_CREATION, is_communication
from pagebuild.api.library import Library
from pagebuild.api.source import Function

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CONSTRUCTORS = ("__init__", "__post_init__")


@dataclass(frozen=True)
class _Scope:
    """A function with what its names stand for."""

    name: str
    module: str
    owner: str
    node: Function


@dataclass(frozen=True)
class CommunicationGraph:
    """The call graph of a library."""

    library: Library  # the library; its files are read, nothing is imported
    _pending: set[tuple[str, str]] = field(default_factory=set, init=False)
    _known: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict, init=False)

    @cached_property
    def communicating(self) -> frozenset[str]:
        """The full names of the functions and classes that communicate with other ranks, directly or through others."""
        uses = {scope.name: set(self._used_names(scope)) for scope in self._scopes.values()}
        found = {name for name, used in uses.items() if any(map(_communicates_directly, used))}
        while more := {name for name, used in uses.items() if name not in found and used & found}:
            found |= more
        makers = {name.rpartition(".")[0] for name in found if name.rpartition(".")[2] in _CONSTRUCTORS}
        return frozenset(found | makers)

    @cached_property
    def _modules(self) -> Mapping[str, ast.Module]:
        return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.library.files.items()}

    @cached_property
    def _names(self) -> Mapping[str, Mapping[str, str]]:
        """Per module, the full names that its names stand for."""
        found = {}
        for module, tree in self._modules.items():
            own = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, _DEFINITIONS)}
            found[module] = {**dict(_imported(tree)), **own, **dict(_assigned(tree, module))}
        return found

    @cached_property
    def _classes(self) -> Mapping[str, tuple[str, ast.ClassDef]]:
        return {
            f"{module}.{node.name}": (module, node)
            for module, tree in self._modules.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }

    @cached_property
    def _fields(self) -> Mapping[str, Mapping[str, ast.expr]]:
        """The annotated attributes of each class, those of `self` in its methods included; the first one counts."""
        found: dict[str, dict[str, ast.expr]] = {name: {} for name in self._classes}
        for name, (_, node) in self._classes.items():
            for child in ast.walk(node):
                if isinstance(child, ast.AnnAssign):
                    target = getattr(child.target, "id", getattr(child.target, "attr", ""))
                    found[name].setdefault(target, child.annotation)
        return found

    @cached_property
    def _related_classes(self) -> Mapping[str, frozenset[str]]:
        """Each class with those that it inherits from and those that inherit from it."""
        above = {name: set(self._bases(name)) for name in self._classes}
        below = defaultdict(set)
        for name, bases in above.items():
            for base in bases:
                below[base].add(name)
        return {name: frozenset({name} | above[name] | below[name]) for name in self._classes}

    @cached_property
    def _scopes(self) -> Mapping[str, _Scope]:
        found = {}
        for module, tree in self._modules.items():
            for owner, node in _functions(tree):
                name = ".".join(part for part in (module, owner, node.name) if part)
                found[name] = _Scope(name, module, f"{module}.{owner}" if owner else "", node)
        return found

    def _bases(self, name: str) -> Iterator[str]:
        module, node = self._classes[name]
        for base in node.bases:
            full = self._resolve(module, base)
            if full in self._classes:
                yield full
                yield from self._bases(full)

    def _resolve(self, module: str, node: ast.expr) -> str:
        """The full name that an expression like `dist.all_reduce` stands for; empty if it is something else."""
        if isinstance(node, ast.Name):
            return self._follow_import(self._names[module].get(node.id, ""))
        if isinstance(node, ast.Attribute):
            base = self._resolve(module, node.value)
            return self._follow_import(f"{base}.{node.attr}") if base else ""
        return ""

    def _follow_import(self, name: str) -> str:
        """The place of definition of a name that a module of the library passes on."""
        module, _, last = name.rpartition(".")
        passed = self._names.get(module, {}).get(last, name) if module in self._modules else name
        return name if passed == name else self._follow_import(passed)

    def _used_names(self, scope: _Scope) -> Iterator[str]:
        """The full names of all functions and classes that the text of a function names."""
        local = self._local_types(scope)
        for node in ast.walk(scope.node):
            if isinstance(node, (ast.Name, ast.Attribute)):
                yield self._resolve(scope.module, node)
            if isinstance(node, ast.Call):
                called = self._resolve(scope.module, node.func)
                yield f"{called}()"
                makers = [called, *self._bases(called)] if called in self._classes else []
                yield from (f"{maker}.{method}" for maker in makers for method in _CONSTRUCTORS)
            if isinstance(node, ast.Attribute):
                for owner in self._expression_types(node.value, scope, local):
                    yield from (f"{kin}.{node.attr}" for kin in self._related_classes[owner])

    def _local_types(self, scope: _Scope) -> Mapping[str, frozenset[str]]:
        arguments = scope.node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        found = {one.arg: self._annotation_types(scope.module, one.annotation) for one in every}
        if scope.owner and every:
            found[every[0].arg] = frozenset({scope.owner})
        for node in ast.walk(scope.node):
            if isinstance(node, ast.Assign):
                types = self._expression_types(node.value, scope, found)
                found.update((target.id, types) for target in node.targets if isinstance(target, ast.Name) and types)
        return found

    def _expression_types(self, node: ast.expr, scope: _Scope, local: Mapping[str, frozenset[str]]) -> frozenset[str]:
        """The classes of the library that the value of an expression may have."""
        if isinstance(node, ast.Name):
            return local.get(node.id, frozenset())
        if isinstance(node, ast.Call):
            return self._return_types(node.func, scope, local)
        if isinstance(node, ast.Attribute):
            owners = self._expression_types(node.value, scope, local)
            return _union(
                self._attribute_types(kin, node.attr) for owner in owners for kin in self._related_classes[owner]
            )
        parts = node.values if isinstance(node, ast.BoolOp) else []
        parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else parts
        return _union(self._expression_types(part, scope, local) for part in parts)

    def _return_types(self, called: ast.expr, scope: _Scope, local: Mapping[str, frozenset[str]]) -> frozenset[str]:
        full = self._resolve(scope.module, called)
        if full in self._classes:
            return frozenset({full})
        names = [full]
        if isinstance(called, ast.Attribute):
            names += [
                f"{kin}.{called.attr}"
                for one in self._expression_types(called.value, scope, local)
                for kin in self._related_classes[one]
            ]
        found = [self._scopes[name] for name in names if name in self._scopes]
        return _union(self._annotation_types(one.module, one.node.returns) for one in found)

    def _attribute_types(self, owner: str, name: str) -> frozenset[str]:
        """The types of an attribute: of a property, a field, or what the constructor assigns."""
        if (owner, name) in self._known:
            return self._known[owner, name]
        module, _ = self._classes[owner]
        getter, maker = self._scopes.get(f"{owner}.{name}"), self._scopes.get(f"{owner}.__init__")
        if getter:
            types = self._annotation_types(module, getter.node.returns)
        elif name in self._fields[owner]:
            types = self._annotation_types(module, self._fields[owner][name])
        elif maker is None or (owner, name) in self._pending:  # the constructor makes it from itself
            return frozenset()
        else:
            self._pending.add((owner, name))
            values = _self_assigned(maker.node, name)
            types = _union(self._expression_types(value, maker, self._local_types(maker)) for value in values)
            self._pending.discard((owner, name))
        if not self._pending:  # inside of another question the answer may lack what that one is about
            self._known[owner, name] = types
        return types

    def _annotation_types(self, module: str, annotation: ast.expr | None) -> frozenset[str]:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        nodes = ast.walk(annotation) if annotation else ()
        names = (self._resolve(module, node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute)))
        return frozenset(name for name in names if name in self._classes)


def _communicates_directly(name: str) -> bool:
    is_call = name.endswith("()")
    return name.removesuffix("()") in GROUP_CREATION if is_call else is_communication(name)


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    for node in tree.body:
        if isinstance(node, Function):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, child) for child in node.body if isinstance(child, Function))


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _assigned(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Other names that a module gives to functions: `f = dist.all_reduce`, `f = getattr(dist, "x", None) or dist.y`."""
    bound = dict(_imported(tree))
    own = {node.name for node in tree.body if isinstance(node, _DEFINITIONS)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values = node.value.values if isinstance(node.value, ast.BoolOp) else [node.value]
            for value in values:
                head, _, rest = ast.unparse(value).partition(".")
                if isinstance(value, (ast.Name, ast.Attribute)) and (head in bound or head in own):
                    yield (
                        node.targets[0].id,
                        ".".join(part for part in (bound.get(head, f"{module}.{head}"), rest) if part),
                    )


def _self_assigned(node: Function, name: str) -> list[ast.expr]:
    return [
        child.value
        for child in ast.walk(node)
        if isinstance(child, ast.Assign)
        for target in child.targets
        if isinstance(target, ast.Attribute) and target.attr == name
    ]
