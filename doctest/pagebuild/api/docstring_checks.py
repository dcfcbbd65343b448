"""What the reference does not say and should: every gap is a finding at the line of the definition."""

import ast
import builtins
import doctest
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pagebuild.api.communication import CommunicationGraph
from pagebuild.api.entry import Entry, star_prefix
from pagebuild.api.inventory import Inventory
from pagebuild.api.names import DocstringContext
from pagebuild.api.source import Function, Module, decorators
from pagebuild.api.target import Target
from pagetest.finding import Finding

_CONSTRUCTORS = ("__init__", "__post_init__")
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_NOTHING = (None, "None", "NoReturn", "Never")


def attributes_in(node: ast.ClassDef) -> Iterator[str]:
    """The public names that a class's body assigns or annotates, and those that its constructor gives to `self`."""
    found = [target for child in node.body for target in _targets(child)]
    for child in node.body:
        if isinstance(child, Function) and child.name in _CONSTRUCTORS:
            found += [target for statement in ast.walk(child) for target in _targets(statement, owner="self")]
    yield from (name for name in dict.fromkeys(found) if not name.startswith("_"))


def _targets(node: ast.AST, owner: str = "") -> Iterator[str]:
    """The names that a statement assigns: bare ones, or those of an owner."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    for target in [part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]:
        if owner and isinstance(target, ast.Attribute) and ast.unparse(target.value) == owner:
            yield target.attr
        elif not owner and isinstance(target, ast.Name):
            yield target.id


def raised_exceptions(node: Function, module: Module, owner: str = "") -> Iterator[tuple[type[BaseException], int]]:
    """The exceptions that `raise` statements name, with their lines."""
    # `raise self._refusal()` counts as what `_refusal` says that it returns. What the text does not show,
    # such as `raise error`, is left out; so are the functions inside this one.
    for statement in _own_statements(node):
        if isinstance(statement, ast.Raise) and statement.exc is not None:
            called = isinstance(statement.exc, ast.Call)
            expression = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
            kind = exception_named(ast.unparse(expression), module.name)
            if kind is None and called:
                kind = _returned_exception(expression, module, owner)
            if kind is not None:
                yield kind, statement.lineno


def exception_named(name: str, module: str) -> type[BaseException] | None:
    """The exception class that a name stands for in a module, as a builtin, or as a full dotted name."""
    head, *rest = name.split(".")
    for space in (vars(import_module(module)), vars(builtins)):
        found = _resolve_attribute(space, head, rest)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    parent, _, last = name.rpartition(".")
    try:
        found = getattr(import_module(parent), last, None) if parent else None
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _resolve_attribute(space: Mapping[str, Any], head: str, rest: list[str]) -> Any:
    found = space.get(head)
    for part in rest:
        found = getattr(found, part, None)
    return found


def _returned_exception(expression: ast.expr, module: Module, owner: str) -> type[BaseException] | None:
    """The exception that a function of this module or class is annotated to return."""
    name = ast.unparse(expression)
    function = module.find(name.replace("self.", f"{owner}.", 1) if owner else name)
    annotation = module.annotation_source(function.returns) if isinstance(function, Function) else None
    return exception_named(annotation, module.name) if annotation else None


def _own_statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _INNER):
            yield child
            yield from _own_statements(child)


@dataclass(frozen=True)
class DocstringChecker:
    """Compares what is documented with what is there."""

    inventory: Inventory
    communication: CommunicationGraph

    def gaps(self, entry: Entry) -> Iterator[Finding]:
        """What is missing in the entry of one object, or described there and does not exist."""
        target = self.inventory.main[entry["name"]]
        if self._is_inherited(target):
            return
        rules: tuple[Callable[[Target, Entry], Iterator[str]], ...] = (
            self._parameter_gaps,
            self._attribute_gaps,
            self._return_gaps,
            self._exception_gaps,
            self._example_gaps,
            self._communication_gaps,
        )
        module, node = self.inventory.resolver.source(target), self.inventory.resolver.node(target)
        line = node.lineno if node else 1
        if not entry["body"] or _is_dataclass_docstring(target):
            says_nothing = "says nothing: describe it in a docstring, or in a text below the assignment"
            yield Finding(module.path, line, f"{target.name} {says_nothing}")
            return
        for rule in rules:
            yield from (Finding(module.path, line, f"{target.name} {message}") for message in rule(target, entry))

    def _is_inherited(self, target: Target) -> bool:
        """An inherited member is judged once, under the first class that has it."""
        return self.inventory.names.main(target.canonical) != target.name

    def _parameter_gaps(self, _target: Target, entry: Entry) -> Iterator[str]:
        real = [star_prefix(one["kind"]) + one["name"] for one in entry["signature"] or ()]
        fields = [one["name"] for one in entry["attributes"] if one["name"] in real]
        documented = [*(one["name"] for one in entry["params"]), *fields]
        for name in real:
            if name not in documented:
                yield f"does not describe its parameter `{name}`: add it to Args"
        for name in documented:
            if name not in real:
                yield f"describes a parameter `{name}` that it does not have: correct Args"

    def _attribute_gaps(self, target: Target, entry: Entry) -> Iterator[str]:
        if not target.is_class:
            return
        resolver = self.inventory.resolver
        owners = [one for one in target.value.__mro__ if resolver.library.owns(one.__module__)]
        nodes = [resolver.sources.find(resolver.defining_module(one), one.__qualname__) for one in owners]
        defined = [set(attributes_in(node)) if isinstance(node, ast.ClassDef) else set() for node in nodes]
        documented = {one["name"] for one in [*(entry["signature"] or ()), *entry["params"], *entry["attributes"]]}
        inherited = "\n".join(one.__doc__ or "" for one in owners[1:])
        for name in sorted(defined[0] - documented):
            if not re.search(rf"^ +{name}: ", inherited, re.MULTILINE):
                yield f"does not describe its attribute `{name}`: add it to Attributes"
        for one in entry["attributes"]:
            if one["name"] not in set().union(*defined) and not hasattr(target.value, one["name"]):
                yield f"describes an attribute `{one['name']}` that it does not have: correct Attributes"

    def _return_gaps(self, target: Target, entry: Entry) -> Iterator[str]:
        if not target.is_function:
            if entry["returns"]:
                yield f"is a {target.kind} and returns nothing: describe it without a Returns section"
            return
        node = self.inventory.resolver.node(target)
        yields = _yield_type(node)
        if yields is not None:
            if yields not in _NOTHING and not entry["yields"]:
                yield f"does not say what it yields ({yields}): add Yields"
        elif entry["return_type"] in _NOTHING:
            if entry["returns"]:
                yield "returns None: drop Returns"
        elif not entry["returns"]:
            yield f"does not say what it returns ({entry['return_type']}): add Returns"

    def _exception_gaps(self, target: Target, entry: Entry) -> Iterator[str]:
        documented = {one["type"]: self._find_exception(one["type"], target) for one in entry["raises"]}
        for name, kind in documented.items():
            if kind is None:
                yield f"documents `{name}`, which is no exception that {target.module} knows: correct Raises"
        known = tuple(kind for kind in documented.values() if kind)
        for kind, line in self._raised_exceptions(target):
            if not issubclass(kind, known):
                yield f"raises {kind.__name__} at line {line} and does not say so: add it to Raises"

    def _find_exception(self, name: str, target: Target) -> type[BaseException] | None:
        full = self.inventory.names.find(name, DocstringContext(target))
        found = self.inventory.main[full].value if full else exception_named(name, target.module)
        return found if isinstance(found, type) and issubclass(found, BaseException) else None

    def _raised_exceptions(self, target: Target) -> Iterator[tuple[type[BaseException], int]]:
        module = self.inventory.resolver.source(target)
        for node in self._own_functions(target):
            owner = target.qualname if target.is_class else target.qualname.rpartition(".")[0]
            yield from raised_exceptions(node, module, owner)

    def _own_functions(self, target: Target) -> Iterator[Function]:
        """The functions whose text is the object's own: a class answers for its constructor."""
        node = self.inventory.resolver.node(target)
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (child for child in node.body if isinstance(child, Function) and child.name in _CONSTRUCTORS)

    def _example_gaps(self, target: Target, entry: Entry) -> Iterator[str]:
        if target.owner is not None or target.kind not in {"class", "function"}:
            return
        if not entry["examples"]:
            yield "shows no example: add an Example section"
            return
        parsed = [one for text in entry["examples"] for one in doctest.DocTestParser().get_examples(text)]
        if not any(one.want or "assert " in one.source for one in parsed):
            yield "has an example that shows no result: print one, or assert it"
        if not any(target.qualname in one.source for one in parsed):
            yield "has an example that does not use it: show how it is used"

    def _communication_gaps(self, target: Target, entry: Entry) -> Iterator[str]:
        if target.canonical in self.communication.communicating and not entry["communication"]:
            owner = self.inventory.main.get(target.name.rpartition(".")[0])
            if not (owner and owner.is_class and self._documents_communication(owner)):
                yield "talks to other ranks: add a line `Communication:` with the operation, the axis and the bytes"

    def _documents_communication(self, owner: Target) -> bool:
        return "\nCommunication:" in (owner.value.__doc__ or "").replace("\n    ", "\n")


def _is_dataclass_docstring(target: Target) -> bool:
    """Whether the docstring is the one that `dataclass` writes."""
    return target.is_class and (target.value.__doc__ or "").startswith(f"{target.value.__name__}(")


def _yield_type(node: object) -> str | None:
    """What a generator or a context manager yields; None for a function that returns."""
    if not isinstance(node, Function) or not any(
        isinstance(child, (ast.Yield, ast.YieldFrom)) for child in ast.walk(node)
    ):
        return None
    returns = node.returns
    if isinstance(returns, ast.Subscript):
        return ast.unparse(returns.slice)
    return ast.unparse(returns) if returns and "contextmanager" not in decorators(node) else "None"
