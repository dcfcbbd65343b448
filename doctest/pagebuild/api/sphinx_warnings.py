"""A warning of Sphinx as a finding: at the line of the object whose docstring it is about."""

import re
from pathlib import Path

from pagebuild.api.target import Resolver, UnknownNameError
from pagetest.finding import Finding

_COLORS = re.compile(r"\x1b\[[\d;]*m")
_DOCSTRING = re.compile(
    r"(?:[^:]+:)?(?:\d+:)? ?docstring of (?P<name>[\w.]+):(?P<line>\d+)?:? ?(?P<message>.*)", re.DOTALL
)
_PAGE = re.compile(r"(?P<path>[^:]+\.\w+):(?:(?P<line>\d+):)? ?(?P<message>.*)", re.DOTALL)


def warning_finding(warning: str, resolver: Resolver) -> Finding:
    """Reads one line of Sphinx's warnings."""
    text = _COLORS.sub("", warning).strip()
    if match := _DOCSTRING.fullmatch(text):
        try:
            target = resolver.resolve(match["name"])
        except UnknownNameError:
            return Finding(resolver.library.folder, 1, text)
        node = resolver.node(target)
        return Finding(resolver.source(target).path, node.lineno if node else 1, f"{match['name']}: {match['message']}")
    if match := _PAGE.fullmatch(text):
        return Finding(Path(match["path"]), int(match["line"] or 1), match["message"])
    return Finding(resolver.library.folder, 1, text)
