"""From docutils' document trees to mdast, the tree of Markdown that websites read."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from docutils import nodes
from sphinx import addnodes

from pagebuild.api.names import DocstringContext, DocumentedNames

Mdast = dict[str, Any]

_ALERTS = {"attention": "warning", "hint": "tip", "danger": "caution", "error": "caution"}
_IGNORED = (nodes.comment, nodes.target, addnodes.index, nodes.substitution_definition, nodes.system_message)
_UNSUPPORTED_ADVICE: dict[type[nodes.Node], str] = {
    nodes.definition_list: "indent all lines of a paragraph by the same width, or write a list with `*`"
}
_TRANSPARENT = (nodes.inline, nodes.problematic, nodes.container, nodes.compound)


class UnsupportedMarkupError(ValueError):
    """A construct of reStructuredText that Markdown has no word for."""


class MdastTranslator:
    """Turns the nodes of one docstring into mdast."""

    def __init__(self, names: DocumentedNames, place: DocstringContext) -> None:
        self._names = names
        self._place = place
        self._makers: tuple[tuple[tuple[type, ...], Callable[[Any], Mdast]], ...] = (
            ((nodes.Text,), self._text),
            ((nodes.paragraph,), lambda node: self._parent("paragraph", node)),
            ((nodes.emphasis,), lambda node: self._parent("emphasis", node)),
            ((nodes.strong,), lambda node: self._parent("strong", node)),
            ((nodes.literal, nodes.title_reference), lambda node: self._word(node.astext(), node.astext())),
            ((addnodes.pending_xref,), self._role),
            ((nodes.reference,), lambda node: self._parent("link", node, url=node.get("refuri", ""))),
            ((nodes.math_block,), lambda node: {"type": "math", "value": node.astext().strip()}),
            ((nodes.math,), lambda node: {"type": "inlineMath", "value": node.astext()}),
            ((nodes.doctest_block,), lambda node: code_block(node.astext())),
            ((nodes.literal_block,), lambda node: code_block(node.astext(), node.get("language", "python"))),
            ((nodes.bullet_list, nodes.enumerated_list), self._list),
            ((nodes.block_quote,), lambda node: self._parent("blockquote", node)),
            ((nodes.Admonition,), self._alert),
        )

    def blocks(self, children: Iterable[nodes.Node]) -> list[Mdast]:
        """Translates the nodes of a docstring, or of a part of it."""
        found = []
        for node in children:
            if isinstance(node, _IGNORED):
                continue
            if isinstance(node, _TRANSPARENT):
                found += self.blocks(node.children)
            else:
                found.append(self._translate(node))
        return found

    def _translate(self, node: nodes.Node) -> Mdast:
        for kinds, make in self._makers:
            if isinstance(node, kinds):
                return make(node)
        advice = _UNSUPPORTED_ADVICE.get(type(node), "say it another way")
        raise UnsupportedMarkupError(f"a {node.__class__.__name__} has no counterpart in Markdown: {advice}")

    def _parent(self, kind: str, node: nodes.Element, **fields: Any) -> Mdast:
        return {"type": kind, **fields, "children": self.blocks(node.children)}

    def _text(self, node: nodes.Text) -> Mdast:
        return {"type": "text", "value": re.sub(r"\s*\n\s*", " ", node.astext())}

    def _word(self, shown: str, meant: str) -> Mdast:
        word = {"type": "inlineCode", "value": " ".join(shown.split())}
        name = self._names.find(meant, self._place)
        return {"type": "link", "url": f"api:{name}", "children": [word]} if name else word

    def _role(self, node: addnodes.pending_xref) -> Mdast:
        meant = node["reftarget"]
        if meant.startswith(self._place.target.module.partition(".")[0] + ".") and not self._names.main(meant):
            raise UnsupportedMarkupError(f"`{meant}` is not in the API reference: correct the name")
        return self._word(node.astext(), meant)

    def _list(self, node: nodes.Element) -> Mdast:
        ordered = isinstance(node, nodes.enumerated_list)
        items = [
            self._parent("listItem", item, spread=False) for item in node.children if isinstance(item, nodes.Element)
        ]
        start = {"start": node.get("start", 1)} if ordered else {}
        return {"type": "list", "ordered": ordered, **start, "spread": False, "children": items}

    def _alert(self, node: nodes.Element) -> Mdast:
        kind = _ALERTS.get(node.tagname, node.tagname)
        return self._parent("blockquote", node, data={"alert": kind})


def code_block(source: str, language: str = "python") -> Mdast:
    """A block of code."""
    return {"type": "code", "lang": language, "value": source}


def _texts(node: Mdast) -> list[str]:
    return [str(node["value"])] if "value" in node else [text for child in node["children"] for text in _texts(child)]
