"""The sections of a docstring, from its document tree."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from docutils import nodes

_EXAMPLES = ("Example", "Examples")
_COMMUNICATION = "Communication:"


@dataclass
class Sections:
    """A docstring split into sections, each a list of document nodes."""

    body: list[nodes.Node] = field(default_factory=list)
    params: dict[str, list[nodes.Node]] = field(default_factory=dict)
    attributes: dict[str, list[nodes.Node]] = field(default_factory=dict)
    returns: list[nodes.Node] = field(default_factory=list)
    yields: list[nodes.Node] = field(default_factory=list)
    raises: list[tuple[str, list[nodes.Node]]] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    communication: list[nodes.Node] = field(default_factory=list)


def split_sections(content: Iterable[nodes.Node]) -> Sections:
    """Sorts the nodes of a docstring into its sections."""
    found = Sections()
    for node in content:
        if isinstance(node, nodes.field_list):
            for one in node.findall(nodes.field):
                _add_node(one, found)
        elif isinstance(node, nodes.admonition) and node.children and node.children[0].astext() in _EXAMPLES:
            found.examples += [block.astext() for block in node.findall(nodes.doctest_block)]
            found.body += _example_prose(node)
        elif isinstance(node, nodes.paragraph) and node.astext().startswith(_COMMUNICATION):
            found.communication.append(_without_label(node))
        else:
            found.body.append(node)
    return found


def _add_node(one: nodes.field, found: Sections) -> None:
    # as written: the text of `name_` would be that of a reference to `name`
    name_node: Any = one.children[0]
    label, body = name_node.rawsource.replace("\\", ""), list(one.children[1].children)
    kind, _, name = label.partition(" ")
    if kind == "param":
        found.params[name] = body
    elif kind == "ivar":
        found.attributes[name] = body
    elif kind == "raises":
        found.raises.append((name, body))
    elif kind.lower() == "returns":
        found.returns += body
    elif kind.lower() == "yields":
        found.yields += body
    else:
        found.body.append(nodes.paragraph("", "", nodes.strong("", label), nodes.Text(": "), *_inline_nodes(body)))


def _inline_nodes(body: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
    for node in body:
        yield from node.children if isinstance(node, nodes.paragraph) else (node,)


def _example_prose(example: nodes.admonition) -> Iterator[nodes.Node]:
    """What an Example section holds in addition to its programs and its title."""
    return (node for node in example.children[1:] if not isinstance(node, nodes.doctest_block))


def _without_label(node: nodes.paragraph) -> nodes.paragraph:
    first = node.children[0].astext().removeprefix(_COMMUNICATION).lstrip()
    return nodes.paragraph("", "", nodes.Text(first), *(child.deepcopy() for child in node.children[1:]))
