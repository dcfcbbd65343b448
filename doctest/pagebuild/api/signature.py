"""Signatures: the names and kinds come from the object, the types and defaults are spelled as in its source."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pagebuild.api.source import Function, Module, decorators
from pagebuild.api.target import Resolver, Target

_WRAPPERS = {"ClassVar", "Final"}
_FIELDS = {"field", "dataclasses.field"}
_TYPES = (ast.Subscript, ast.BinOp)
_NAME = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*")
_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional_only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional_or_keyword",
    inspect.Parameter.VAR_POSITIONAL: "var_positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword_only",
    inspect.Parameter.VAR_KEYWORD: "var_keyword",
}


@dataclass(frozen=True)
class SourceFormatter:
    """Formats types and defaults of one module as its source has them."""

    module: Module
    resolver: Resolver

    def type(self, annotation: ast.expr | None) -> str | None:
        """A type as it is written; an alias that has no entry of its own is written out."""
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in _WRAPPERS:
            annotation = annotation.slice
        text = self.module.annotation_source(annotation)
        return text and _NAME.sub(lambda match: self._expand_alias(match.group()), text)

    def default(self, node: ast.expr | None) -> str | None:
        """The default value of a parameter; text keeps its quotes."""
        return None if node is None else self.module.expression_source(node)

    def field_default(self, node: ast.expr | None) -> str | None:
        """The default value of a dataclass's field; a factory is shown as the call that it will be."""
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in _FIELDS:
            return self.default(node)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        factory = given.get("default_factory")
        if isinstance(factory, ast.Lambda):
            return self.default(factory.body)
        return f"{self.default(factory)}()" if factory else self.default(given.get("default"))

    def return_type(self, node: Function) -> str | None:
        """What a call returns; the generator inside a `contextmanager` is not visible to callers."""
        if "contextmanager" in decorators(node) and isinstance(node.returns, ast.Subscript):
            return f"contextlib.AbstractContextManager[{self.type(node.returns.slice)}]"
        return self.type(node.returns)

    def _expand_alias(self, name: str) -> str:
        module, spelling = self.resolver.sources.assigning_module(self.module.name, name)
        if f"{module}.{spelling}" in self.resolver.public_definitions:
            return name
        found = self.resolver.sources.find(module, spelling)
        if isinstance(found, (ast.Assign, ast.AnnAssign)) and isinstance(found.value, _TYPES):
            return SourceFormatter(self.resolver.sources.module(module), self.resolver).type(found.value) or name
        return name


@dataclass(frozen=True)
class Parameter:
    """One parameter; type and default are source text, None where there is none."""

    name: str
    kind: str
    type: str | None
    default: str | None


@dataclass(frozen=True)
class Signature:
    """What a function or a class is called with, and what it returns."""

    # The parameters, `self` and `cls` left out; None where an object is not meant to be called.
    parameters: tuple[Parameter, ...] | None
    return_type: str | None = None


def signature_of(target: Target, resolver: Resolver) -> Signature:
    """The signature of any object; that of a class is the one of its constructor, and an enumeration needs none."""
    if target.is_class and issubclass(target.value, Enum):
        return Signature(None)
    if target.is_class:
        return Signature(_class_signature(target, resolver))
    node, speller = resolver.node(target), SourceFormatter(resolver.source(target), resolver)
    if target.is_function:
        assert isinstance(node, Function)
        function = getattr(target.value, "__func__", target.value)
        return Signature(_function_signature(function, node, speller, target.kind), speller.return_type(node))
    if target.kind == "property" and isinstance(node, Function):
        return Signature(None, speller.type(node.returns))
    return Signature(None)


def attribute_type(target: Target, name: str, resolver: Resolver) -> str | None:
    """The annotation of an attribute of a class: in its body, on a property, or where a method assigns it."""
    for owner in _defining_classes(target.value, resolver):
        speller = SourceFormatter(resolver.sources.module(resolver.defining_module(owner)), resolver)
        node = speller.module.find(owner.__qualname__)
        for child in ast.walk(node) if node else ():
            if isinstance(child, ast.AnnAssign) and _target_name(child) == name:
                return speller.type(child.annotation)
            if isinstance(child, Function) and child.name == name:
                return speller.type(child.returns)
    return None


def _defining_classes(value: Any, resolver: Resolver) -> Iterator[type]:
    return (owner for owner in value.__mro__ if resolver.library.owns(owner.__module__))


def _target_name(node: ast.AnnAssign) -> str:
    if isinstance(node.target, ast.Attribute):
        return node.target.attr
    return node.target.id if isinstance(node.target, ast.Name) else ""


def _class_signature(target: Target, resolver: Resolver) -> tuple[Parameter, ...] | None:
    maker = next((owner for owner in target.value.__mro__ if "__init__" in vars(owner)), object)
    if resolver.library.owns(maker.__module__):
        speller = SourceFormatter(resolver.sources.module(resolver.defining_module(maker)), resolver)
        node = speller.module.find(f"{maker.__qualname__}.__init__")
        if isinstance(node, Function):
            return _function_signature(vars(maker)["__init__"], node, speller, "method")
        return tuple(_dataclass_parameters(target.value, resolver)) if dataclasses.is_dataclass(maker) else ()
    if maker is object:
        return ()
    has_none = target.kind == "exception" or issubclass(target.value, type)  # a metaclass: called by Python alone
    return None if has_none else tuple(_external_parameters(target.value))


def _function_signature(function: Any, node: Function, speller: SourceFormatter, kind: str) -> tuple[Parameter, ...]:
    written = _arguments(node, speller)
    parameters = list(inspect.signature(function).parameters.values())
    if kind in {"method", "classmethod"}:
        parameters = parameters[1:]
    return tuple(Parameter(one.name, _KINDS[one.kind], *written[one.name]) for one in parameters)


def _arguments(node: Function, speller: SourceFormatter) -> dict[str, tuple[str | None, str | None]]:
    """The type and the default of each parameter as they are written."""
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(node.args.defaults))
    pairs = list(zip(positional, [*defaults, *node.args.defaults], strict=True))
    pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    pairs += [(one, None) for one in (node.args.vararg, node.args.kwarg) if one]
    return {one.arg: (speller.type(one.annotation), speller.default(default)) for one, default in pairs}


def _dataclass_parameters(value: Any, resolver: Resolver) -> Iterator[Parameter]:
    """The parameters of a constructor that `dataclass` wrote."""
    written: dict[str, tuple[str | None, str | None]] = {}
    for owner in reversed(list(_defining_classes(value, resolver))):
        speller = SourceFormatter(resolver.sources.module(resolver.defining_module(owner)), resolver)
        for child in getattr(speller.module.find(owner.__qualname__), "body", ()):
            if isinstance(child, ast.AnnAssign):
                written[_target_name(child)] = speller.type(child.annotation), speller.field_default(child.value)
    for one in inspect.signature(value).parameters.values():
        yield Parameter(one.name, _KINDS[one.kind], *written[one.name])


def _external_parameters(value: Any) -> Iterator[Parameter]:
    """The parameters of a constructor that another library wrote."""
    empty = inspect.Parameter.empty
    for one in inspect.signature(value).parameters.values():
        written = None if one.annotation is empty else inspect.formatannotation(one.annotation)
        yield Parameter(one.name, _KINDS[one.kind], written, None if one.default is empty else repr(one.default))


def format_parameters(parameters: Iterable[Parameter]) -> Iterator[str]:
    """The elements of a parameter list in Python's own form, the marks `/` and `*` included."""
    kind = ""
    for one in parameters:
        if kind == "positional_only" != one.kind:
            yield "/"
        if one.kind == "keyword_only" and kind not in {"keyword_only", "var_positional"}:
            yield "*"
        kind = one.kind
        star = {"var_positional": "*", "var_keyword": "**"}.get(kind, "")
        annotation = f": {one.type}" if one.type else ""
        equals = " = " if one.type else "="
        yield f"{star}{one.name}{annotation}{equals + one.default if one.default is not None else ''}"
    if kind == "positional_only":
        yield "/"
