"""The pages of the API reference: those of its contents, with a hook for every object."""

from collections.abc import Iterator, Mapping
from typing import Any

from pagebuild.api.contents import ApiPage

_MARKS = {"emphasis": "*", "strong": "**"}

Object = Mapping[str, Any]


def reference_page(page: ApiPage, objects: Mapping[str, Object], language: str) -> str:
    """The Markdown of a page: what its modules say, and each of its objects."""
    shown = (
        summary(objects[name]) if objects[name]["kind"] == "module" else f"{{{{ autodoc:{name} }}}}"
        for name in page.objects
    )
    return "\n\n".join([f"# {page.title[language]}", *filter(None, shown)]) + "\n"


def summary(found: Object) -> str:
    """The first paragraph of an object's docstring, as Markdown."""
    paragraphs = (node for node in found.get("body", ()) if node["type"] == "paragraph")
    return "".join(_inline_markdown(next(paragraphs, {"type": "paragraph"})))


def missing_names(objects: Mapping[str, Object]) -> list[str]:
    """What modules offer and the reference lacks."""
    modules = [found for found in objects.values() if found["kind"] == "module"]
    return [name for found in modules for name in found["members"] if name not in objects]


def _inline_markdown(node: Mapping[str, Any]) -> Iterator[str]:
    """Text with its code and its emphasis; links lose their target, which only the website knows."""
    if node["type"] == "inlineCode":
        yield f"`{node['value']}`"
    elif node["type"] == "inlineMath":
        yield f"${node['value']}$"
    elif "children" in node:
        mark = _MARKS.get(node["type"], "")
        yield mark
        for child in node["children"]:
            yield from _inline_markdown(child)
        yield mark
    else:
        yield " ".join(node.get("value", "").split("\n"))
