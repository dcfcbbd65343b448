"""The pages of the API reference: one per public module, with a hook for every name that it offers."""

from collections.abc import Iterator, Mapping
from typing import Any

_ORDER = ("class", "exception", "function", "data")
_MARKS = {"emphasis": "*", "strong": "**"}

Object = Mapping[str, Any]


def module_pages(objects: Mapping[str, Object]) -> dict[str, str]:
    """The Markdown of each module's page."""
    return {name: _page(name, objects) for name, found in objects.items() if _is_shown(name, found, objects)}


def summary(found: Object) -> str:
    """The first paragraph of an object's docstring, as Markdown."""
    paragraphs = (node for node in found.get("body", ()) if node["type"] == "paragraph")
    return "".join(_inline_markdown(next(paragraphs, {"type": "paragraph"})))


def missing_names(objects: Mapping[str, Object]) -> list[str]:
    """What modules offer and the reference lacks."""
    modules = [found for found in objects.values() if found["kind"] == "module"]
    return [name for found in modules for name in found["members"] if name not in objects]


def _is_shown(name: str, found: Object, objects: Mapping[str, Object]) -> bool:
    return found["kind"] == "module" and any(_public_names(name, objects))


def _page(name: str, objects: Mapping[str, Object]) -> str:
    parts = [f"# {name}", summary(objects[name]), *(f"{{{{ autodoc:{one} }}}}" for one in sorted_names(name, objects))]
    return "\n\n".join(part for part in parts if part) + "\n"


def sorted_names(module: str, objects: Mapping[str, Object]) -> list[str]:
    """What a module offers: classes, exceptions, functions and data, by their names."""

    def place(name: str) -> tuple[int, str]:
        kind = objects[name]["kind"]
        return _ORDER.index(kind) if kind in _ORDER else len(_ORDER), name

    return sorted(_public_names(module, objects), key=place)


def _public_names(module: str, objects: Mapping[str, Object]) -> Iterator[str]:
    return (name for name in objects[module]["members"] if objects[name]["kind"] != "module")


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
