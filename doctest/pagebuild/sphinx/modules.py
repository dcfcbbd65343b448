"""The page of a module in the Sphinx site, and the description of one object there."""

from collections.abc import Collection, Iterator

from pagebuild.api.docstrings import autodoc_directive
from pagebuild.api.inventory import Inventory
from pagebuild.api.target import Target

_INDENT = "   "


def module_page(module: str, inventory: Inventory) -> str:
    """The reStructuredText of a module's page: what the module says, then each name that it offers."""
    lines = [module, "=" * len(module), "", f".. automodule:: {module}", ""]
    lines += _alias_list(module, inventory)
    for target in sorted(_own_names(module, inventory), key=_sort_key):
        lines += describe_object(target, inventory)
    return "\n".join(lines)


def describe_object(
    target: Target, inventory: Inventory, *, indexed: bool = True, without: Collection[str] = ()
) -> list[str]:
    """The directive of an object, those of a class's members inside."""
    # An object may be described in many places; links lead to the one that is indexed.
    options = [] if indexed else [f"{_INDENT}:no-index:"]
    if target.kind == "exception":
        options.append(f"{_INDENT}:show-inheritance:")
    head = f".. {autodoc_directive(target)}:: {target.name}"
    body = []
    if target.kind == "data":
        module, node = inventory.resolver.source(target), inventory.resolver.node(target)
        owner, _, name = target.name.rpartition(".")
        head = f".. py:data:: {name}"
        options.append(f"{_INDENT}:module: {owner}")  # otherwise the page's module and this name after it
        body = module.attribute_docstring(node).splitlines() if node else []
    for member in inventory.resolver.members(target):
        if member.name not in without:
            body += describe_object(member, inventory, indexed=indexed)
    return [head, *options, "", *(_INDENT + line if line else "" for line in body), ""]


def _own_names(module: str, inventory: Inventory) -> Iterator[Target]:
    return (
        target
        for target in inventory.main.values()
        if target.owner is None and target.kind != "module" and target.name.rpartition(".")[0] == module
    )


def _sort_key(target: Target) -> tuple[bool, bool, str]:
    """Classes first, then functions and data, exceptions last."""
    return target.kind == "exception", not target.is_class, target.name


def _alias_list(module: str, inventory: Inventory) -> list[str]:
    """Names that lead to objects described elsewhere."""
    names = (f"{module}.{name}" for name in inventory.resolver.library.modules[module])
    rows = [(name, inventory.names.main(name)) for name in sorted(names)]
    return [
        *(f"* ``{name}`` → :py:obj:`{main}`" for name, main in rows if main and main != name),
        *(f"* :py:mod:`{name}`" for name in inventory.resolver.library.modules if name.rpartition(".")[0] == module),
        "",
    ]
