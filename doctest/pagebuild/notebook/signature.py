"""A hook in a notebook: the object's signature, and its first paragraph."""

from collections.abc import Iterable, Mapping
from typing import Any

from pagebuild.notebook.texts import format_text
from pagebuild.site.reference import summary

_STARS = {"var_positional": "*", "var_keyword": "**"}


def summarize_object(found: Mapping[str, Any], language: str) -> str:
    """What stands in the place of a hook.

    Args:
        found: The object's entry in the API reference.
        language: The language of the words around it.
    """
    name = found["name"]
    call = f"({', '.join(_parameters(found['signature']))})" if found["signature"] is not None else ""
    parts = [f"**`{name}{call}`**", summary(found), f"*{format_text('help', language, name=name)}*"]
    return "\n\n".join(part for part in parts if part)


def _parameters(signature: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for one in signature:
        default = f"={one['default']}" if one["default"] is not None else ""
        yield f"{_STARS.get(one['kind'], '')}{one['name']}{default}"
