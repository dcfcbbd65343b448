"""The entry of one object in api.json."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from docutils import nodes

from pagebuild.api.inventory import Inventory
from pagebuild.api.mdast import Mdast, MdastTranslator
from pagebuild.api.names import DocstringContext
from pagebuild.api.sections import Sections, split_sections
from pagebuild.api.signature import Signature, attribute_type, signature_of
from pagebuild.api.source import first_line
from pagebuild.api.target import Target

Entry = dict[str, Any]

_WORD = re.compile(r"(?<![\w\"'])[A-Za-z_][\w.]*")


def make_entry(target: Target, content: Iterable[nodes.Node], inventory: Inventory) -> Entry:
    """Puts together what is known of an object."""
    sections, signature = split_sections(content), signature_of(target, inventory.resolver)
    parameters = signature.parameters or ()
    place = DocstringContext(target, frozenset([*sections.params, *(parameter.name for parameter in parameters)]))
    blocks = MdastTranslator(inventory.names, place).blocks
    entry = {
        "name": target.name,
        "canonical": target.canonical,
        "alias_of": None if target.name in inventory.main else inventory.names.main(target.name),
        "kind": target.kind,
        "source": _source_entry(target, inventory),
        "bases": _bases(target, inventory),
        "signature": None if signature.parameters is None else [vars(parameter) for parameter in parameters],
        "return_type": signature.return_type,
        "body": blocks(sections.body),
        "params": _parameter_entries(sections, signature, blocks),
        "attributes": [
            {"name": name, "type": attribute_type(target, name, inventory.resolver), "body": blocks(body)}
            for name, body in sections.attributes.items()
        ],
        "returns": _result_entry(signature, blocks(sections.returns)),
        "yields": _result_entry(signature, blocks(sections.yields)),
        "raises": [{"type": kind, "body": blocks(body)} for kind, body in sections.raises],
        "examples": sections.examples,
        "communication": blocks(sections.communication),
        "members": _members(target, inventory),
    }
    return {**entry, "links": _links(entry, place, inventory)}


def _parameter_entries(sections: Sections, signature: Signature, blocks: Any) -> list[Mdast]:
    """The documented parameters in the order of the signature, then those that it does not have."""
    known = {star_prefix(parameter.kind) + parameter.name: parameter for parameter in signature.parameters or ()}
    order = sorted(sections.params, key=lambda name: list(known).index(name) if name in known else len(known))
    return [
        {
            "name": name,
            "type": known[name].type if name in known else None,
            "default": known[name].default if name in known else None,
            "body": blocks(sections.params[name]),
        }
        for name in order
    ]


def star_prefix(kind: str) -> str:
    """What stands before the name of a parameter that takes many values."""
    return {"var_positional": "*", "var_keyword": "**"}.get(kind, "")


def _result_entry(signature: Signature, body: list[Mdast]) -> Entry | None:
    return {"type": signature.return_type, "body": body} if body else None


def _source_entry(target: Target, inventory: Inventory) -> Entry:
    module, node = inventory.resolver.source(target), inventory.resolver.node(target)
    line, end = (first_line(node), node.end_lineno) if node else (1, len(module.text.splitlines()))
    return {"file": inventory.resolver.library.relative_path(module.path), "line": line, "end": end}


def _bases(target: Target, inventory: Inventory) -> list[str]:
    bases = target.value.__bases__ if target.is_class else ()
    full = (f"{base.__module__}.{base.__qualname__}" for base in bases if base is not object)
    return [inventory.names.main(name) or name.removeprefix("builtins.") for name in full]


def _members(target: Target, inventory: Inventory) -> list[str]:
    if target.kind == "module":
        offered = inventory.resolver.library.modules.get(target.name, ())
        return sorted(f"{target.name}.{name}" for name in offered)
    main = inventory.main.get(inventory.names.main(target.name) or "", target)
    return [member.name for member in inventory.resolver.members(main)]


def _links(entry: Entry, place: DocstringContext, inventory: Inventory) -> Mapping[str, str]:
    """The names in types that are documented objects."""
    parts = [*(entry["signature"] or ()), *entry["params"], *entry["attributes"], *entry["raises"]]
    texts = [entry["return_type"], *(part["type"] for part in parts)]
    words = sorted({word for text in texts if text for word in _WORD.findall(text)})
    bare = DocstringContext(place.target)
    found = {word: inventory.names.find(word, bare) for word in words}
    return {word: name for word, name in found.items() if name}
