"""The API reference in the Sphinx site: the page to begin with, groups of pages, and the description of objects."""

from collections.abc import Collection, Iterator, Mapping

from pagebuild.api.contents import ApiGroup, ApiPage, Contents
from pagebuild.api.docstrings import autodoc_directive
from pagebuild.api.inventory import Inventory
from pagebuild.api.target import Target
from pagebuild.sphinx.texts import texts_of

_INDENT = "   "
_FENCE = "`" * 8  # longer than any fence in a docstring


def reference_pages(contents: Contents, inventory: Inventory, language: str) -> Mapping[str, str]:
    """Every page of the reference in MyST, by its name."""
    found = {"index": contents.opening[language]}
    for group in contents.groups:
        found[group.name] = "\n".join(_group_page(group, inventory, language))
        for page in group.pages:
            found[page.name] = "\n".join(_object_page(page, inventory, language))
    return found


def toctree(caption: str, names: Collection[str], *options: str) -> Iterator[str]:
    """A list of pages, which makes the sidebar."""
    captions = [f":caption: {caption}"] if caption else []
    yield from ("```{toctree}", ":maxdepth: 1", *captions, *options, "", *names, "```", "")


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


def _group_page(group: ApiGroup, inventory: Inventory, language: str) -> Iterator[str]:
    """What each page of a group describes."""
    yield from (f"# {group.title[language]}", "")
    for page in group.pages:
        objects = [name for name in page.objects if inventory.main[name].kind != "module"]
        words = ", ".join(f"`{name.rpartition('.')[2]}`" for name in objects)
        yield f"- [{page.title[language]}]({page.name}.md): {words}"
    yield ""
    yield from toctree("", [page.name for page in group.pages], ":hidden:")


def _object_page(page: ApiPage, inventory: Inventory, language: str) -> Iterator[str]:
    yield from (f"# {page.title[language]}", "", f"{_FENCE}{{eval-rst}}")
    for name in page.objects:
        target = inventory.main[name]
        is_module = target.kind == "module"
        described = [] if is_module else describe_object(target, inventory, without=page.without)
        yield from [f".. automodule:: {name}", ""] if is_module else described
    yield _FENCE
    others = [(alias, main) for alias, main in _public_aliases(inventory) if main in page.objects]
    if others:
        yield from ("", texts_of(language).aliases, "")
    yield from (f"- `{alias}`: `{main}`" for alias, main in others)


def _public_aliases(inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Other public names of objects, each with the main one."""
    for target in inventory.resolver.public_names:
        main = inventory.names.main(target.name)
        if main and main != target.name:
            yield target.name, main
