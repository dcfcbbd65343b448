"""Types and defaults in the words of the source."""

import ast
import re
from dataclasses import dataclass

from pagebuild.api.source import Function, Module, decorators
from pagebuild.api.target import Resolver

_WRAPPERS = {"ClassVar", "Final"}
_FIELDS = {"field", "dataclasses.field"}
_TYPES = (ast.Subscript, ast.BinOp)
_NAME = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*")


@dataclass(frozen=True)
class SourceFormatter:
    """Spells expressions of one module.

    Attributes:
        module: The module.
        resolver: Knows what other modules call what.
    """

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
        """What a call returns; the generator behind a `contextmanager` is not seen from outside."""
        if "contextmanager" in decorators(node) and isinstance(node.returns, ast.Subscript):
            return f"contextlib.AbstractContextManager[{self.type(node.returns.slice)}]"
        return self.type(node.returns)

    def _expand_alias(self, name: str) -> str:
        home, spelling = self.resolver.sources.assigning_module(self.module.name, name)
        if f"{home}.{spelling}" in self.resolver.public_definitions:
            return name
        found = self.resolver.sources.find(home, spelling)
        if isinstance(found, (ast.Assign, ast.AnnAssign)) and isinstance(found.value, _TYPES):
            return SourceFormatter(self.resolver.sources.module(home), self.resolver).type(found.value) or name
        return name
