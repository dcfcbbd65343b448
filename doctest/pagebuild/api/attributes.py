"""The public attributes of a class, as far as its source shows them."""

import ast
from collections.abc import Iterator

from pagebuild.api.source import Function

_CONSTRUCTORS = ("__init__", "__post_init__")


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
