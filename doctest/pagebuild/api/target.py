"""Objects of a library, found by the names under which they are documented."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from pagebuild.api.library import Library
from pagebuild.api.source import Definition, Module, SourceModules

CLASSES = ("class", "exception")
FUNCTIONS = ("function", "method", "classmethod", "staticmethod")


class UnknownNameError(LookupError):
    """A dotted name that leads to no public object."""


@dataclass(frozen=True)
class Target:
    """An object of the library."""

    name: str  # the name under which it is documented
    # What it is: class, exception, function, method, classmethod, staticmethod, property, attribute, module or
    # data.
    kind: str
    module: str  # the module that defines it
    qualname: str  # its name there; empty for a module itself
    value: Any
    owner: type | None = None  # the class through which a member was reached

    @property
    def canonical(self) -> str:
        """Where the object is defined, as a dotted name."""
        return f"{self.module}.{self.qualname}" if self.qualname else self.module

    @property
    def is_class(self) -> bool:
        """Whether the object is a class, an exception included."""
        return self.kind in CLASSES

    @property
    def is_function(self) -> bool:
        """Whether the object is a function or a method."""
        return self.kind in FUNCTIONS


def is_public(name: str) -> bool:
    """Whether a name is for users: those of calls are, other special methods are called by Python only."""
    return not name.startswith("_") or name == "__call__"


@dataclass(frozen=True)
class Resolver:
    """Finds objects by dotted names."""

    library: Library

    @cached_property
    def sources(self) -> SourceModules:
        """The library's modules as they are written."""
        return SourceModules(self.library.package)

    def resolve(self, name: str) -> Target:
        """Imports what a dotted name stands for."""
        module, parts = self._module_of(name)
        if not parts:
            return Target(name, "module", name, "", import_module(name))
        offered = self.library.modules.get(module, ())
        if not all(part in offered or is_public(part) for part in parts):
            raise UnknownNameError(f"{name} is private")
        target = self._resolve_top_level(f"{module}.{parts[0]}", module, parts[0])
        for part in parts[1:]:
            target = self._resolve_member(f"{target.name}.{part}", target.value, part)
        return target

    def members(self, target: Target) -> list[Target]:
        """The public methods and properties of a class, inherited ones included, in the order of the source."""
        if not target.is_class:
            return []
        owners = [owner for owner in target.value.__mro__ if self.library.owns(owner.__module__)]
        names = dict.fromkeys(name for owner in reversed(owners) for name in _own_members(owner) if is_public(name))
        found = [self._resolve_member(f"{target.name}.{name}", target.value, name) for name in names]
        return [member for member in found if member.kind != "attribute"]

    def node(self, target: Target) -> Definition | None:
        """The statement that defines the object."""
        return self.sources.find(target.module, target.qualname) if target.qualname else None

    def source(self, target: Target) -> Module:
        """The module that defines the object."""
        return self.sources.module(target.module)

    def defining_module(self, value: Any) -> str:
        """The module whose source defines a class or a function; it may say another one, which exports it."""
        module: str = value.__module__
        return self.sources.assigning_module(module, value.__qualname__)[0] if self.library.owns(module) else module

    @cached_property
    def public_names(self) -> list[Target]:
        """Every public module and every name that one offers, sorted by name."""
        modules = [self.resolve(module) for module in self.library.modules]
        names = (f"{module}.{name}" for module, offered in self.library.modules.items() for name in offered)
        return sorted([*modules, *(t for t in map(self.resolve, names) if t.kind != "module")], key=lambda t: t.name)

    @cached_property
    def public_definitions(self) -> frozenset[str]:
        """The places of definition of the public names."""
        return frozenset(target.canonical for target in self.public_names)

    def _module_of(self, name: str) -> tuple[str, list[str]]:
        parts = name.split(".")
        if not self.library.owns(parts[0]):
            raise UnknownNameError(f"{name} does not belong to {self.library.package}")
        for count in range(len(parts), 0, -1):
            module, outer = ".".join(parts[:count]), ".".join(parts[: count - 1])
            if parts[count - 1] in self.library.modules.get(outer, ()) and module not in self.library.modules:
                continue  # a function that hides the module of its own name
            try:
                import_module(module)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                    raise
            else:
                return module, parts[count:]
        raise UnknownNameError(f"{name}: there is no module {parts[0]}")

    def _resolve_top_level(self, name: str, module: str, part: str) -> Target:
        try:
            value = getattr(import_module(module), part)
        except AttributeError:
            raise UnknownNameError(f"{module} has no {part}") from None
        if inspect.isclass(value) or inspect.isfunction(value):
            if not self.library.owns(value.__module__):
                raise UnknownNameError(f"{name} is {value.__module__}.{value.__qualname__} of another library")
            return Target(name, _kind(value), self.defining_module(value), value.__qualname__, value)
        owner, spelling = self.sources.assigning_module(module, part)
        return Target(name, "data", owner, spelling, value)

    def _resolve_member(self, name: str, owner: Any, part: str) -> Target:
        definer = next(iter(_defining_classes(owner, part)), None)
        if definer is None:
            raise UnknownNameError(f"{name.rpartition('.')[0]} has no {part}")
        raw = vars(definer).get(part)
        module = self.defining_module(definer)
        return Target(name, _member_kind(raw), module, f"{definer.__qualname__}.{part}", raw, owner)


def _defining_classes(owner: Any, part: str) -> Iterator[type]:
    for one in getattr(owner, "__mro__", ()):
        if part in _own_members(one) or part in vars(one).get("__annotations__", {}):
            yield one


def _own_members(owner: type) -> list[str]:
    """The names in a class, without the methods of its bases that another library put there."""
    # torch wraps the `step` of an optimizer's class when it first makes an instance, inherited or not.
    return [name for name, raw in vars(owner).items() if not (inspect.isfunction(raw) and _is_of_base(raw, owner))]


def _is_of_base(function: Any, owner: type) -> bool:
    return any(_place(function) == _place(vars(base).get(function.__name__)) for base in owner.__mro__[1:])


def _place(function: Any) -> tuple[object, object]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def _kind(value: Any) -> str:
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function"


def _member_kind(raw: Any) -> str:
    if isinstance(raw, (property, cached_property)):
        return "property"
    if isinstance(raw, (classmethod, staticmethod)):
        return type(raw).__name__
    return "method" if inspect.isfunction(raw) else "attribute"
