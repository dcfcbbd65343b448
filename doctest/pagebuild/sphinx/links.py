"""Links of the Sphinx site: documented objects that docstrings name, and names of other libraries."""

import ast
import builtins
import inspect
from collections.abc import Collection, Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from pagebuild.api.inventory import Inventory
from pagebuild.api.names import DocstringContext
from pagebuild.api.signature import signature_of
from pagebuild.api.target import Target

_WORDS = (nodes.literal, nodes.title_reference)
_VARIABLES = (TypeVar, ParamSpec)
_LINKS = (addnodes.pending_xref, nodes.reference, nodes.title)


class LinkResolver:
    """Resolves names in docstrings, and references that Sphinx does not find, to links."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._places: dict[str, DocstringContext] = {}

    def link_words(self, _app: Sphinx, doctree: nodes.document) -> None:
        """Marks names in docstrings as code, and links those of documented objects."""
        for word, target in list(_docstring_words(doctree, self._inventory)):
            text = word.astext()
            code = nodes.literal(text, text, classes=["docutils", "literal"])
            main = self._inventory.names.find(text, self._docstring_context(target))
            word.replace_self(_reference(main, code) if main else code)

    def resolve(
        self, app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, shown: nodes.TextElement
    ) -> nodes.Element | None:
        """Finds what Sphinx did not: other names of documented objects, and names of other libraries."""
        # A name of another library has no page here; it is accepted if it can be imported, and shown as text.
        # So is one that is described on a page that is not built.
        if node.get("refdomain") != "py":
            return None
        name, target = node["reftarget"], self._described_object(node)
        main = (
            self._inventory.names.find(name, DocstringContext(target)) if target else self._inventory.names.main(name)
        )
        if main:
            domain = env.domains.python_domain
            found = domain.resolve_xref(env, node["refdoc"], app.builder, "obj", main, node, shown)
            return shown if found is None and not self._is_described(main, app.config.api_described) else found
        value = self._find_value(name, target)
        return shown if value is not None and self._is_external(name, value) else None

    def _described_object(self, node: nodes.Node) -> Target | None:
        """The object in whose description a node stands."""
        descriptions = [one for one in _enclosing_description(node) if isinstance(one, addnodes.desc)]
        return _described_target(descriptions[0], self._inventory) if descriptions else None

    def _docstring_context(self, target: Target) -> DocstringContext:
        """The context of an object's docstring; cached, as docstrings have many names."""
        if target.name not in self._places:
            parameters = signature_of(target, self._inventory.resolver).parameters or ()
            self._places[target.name] = DocstringContext(target, frozenset(parameter.name for parameter in parameters))
        return self._places[target.name]

    def _is_described(self, main: str, described: Collection[str]) -> bool:
        """Whether an object, or what it is a member of, is on a page that is built."""
        is_member = self._inventory.main[main].owner is not None
        return (main.rpartition(".")[0] if is_member else main) in described

    def _find_value(self, name: str, target: Target | None) -> Any:
        """What a name stands for in the description of an object, or anywhere; None if that is nothing."""
        value = find_in_module(target.module, name) if target else None
        return import_object(name) if value is None else value

    def _is_external(self, name: str, value: Any) -> bool:
        """Whether a name stands for something of another library, or for a variable of types."""
        module = getattr(value, "__module__", None) or name
        return isinstance(value, _VARIABLES) or not self._inventory.resolver.library.owns(module)


def find_in_module(module: str, name: str) -> Any:
    """The object that a name stands for inside a module; None if there is none."""
    head, *rest = name.split(".")
    found = import_module(module)
    if head in vars(found):
        return _follow_attributes(vars(found)[head], rest)
    elsewhere = _type_checking_imports(found).get(head)
    return import_object(".".join([elsewhere, *rest])) if elsewhere else None


@cache
def _type_checking_imports(module: ModuleType) -> dict[str, str]:
    """The full names of what a module imports only for its annotations."""
    names: dict[str, str] = {}
    for block in ast.parse(inspect.getsource(module)).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                if isinstance(line, ast.ImportFrom):
                    names |= {one.asname or one.name: f"{line.module}.{one.name}" for one in line.names}
    return names


def import_object(name: str) -> Any:
    """The object that a dotted name stands for; None if there is none."""
    parts = name.split(".")
    if hasattr(builtins, parts[0]):
        return _follow_attributes(builtins, parts)
    for count in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:count]))
        except (ImportError, TypeError, ValueError):
            continue
        return _follow_attributes(found, parts[count:])
    return None


def _follow_attributes(value: Any, parts: list[str]) -> Any:
    for part in parts:
        value = getattr(value, part, None)
    return value


def _docstring_words(doctree: nodes.document, inventory: Inventory) -> Iterator[tuple[nodes.Element, Target]]:
    """The code-like names in docstrings, each with the object whose docstring it is."""
    module = inventory.main.get(_module_of(doctree))
    for word in doctree.findall(lambda node: isinstance(node, _WORDS)):
        around = list(_enclosing_description(word))
        if any(isinstance(node, _LINKS) for node in around):
            continue
        description = next((node for node in around if isinstance(node, addnodes.desc)), None)
        target = _described_target(description, inventory) if description else module
        if target and isinstance(word, nodes.Element):
            yield word, target


def _module_of(doctree: nodes.document) -> str:
    """The module whose text a page shows first."""
    ids = (str(one) for node in doctree.findall(nodes.target) for one in node.get("ids", ()))
    return next((one.removeprefix("module-") for one in ids if one.startswith("module-")), "")


def _enclosing_description(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _described_target(description: addnodes.desc, inventory: Inventory) -> Target | None:
    signature = description.children[0]
    assert isinstance(signature, nodes.Element)
    return inventory.main.get(f"{signature.get('module')}.{signature.get('fullname')}")


def _reference(name: str, shown: nodes.literal) -> addnodes.pending_xref:
    return addnodes.pending_xref(
        "", shown, refdomain="py", reftype="obj", reftarget=name, refexplicit=True, refwarn=True
    )
