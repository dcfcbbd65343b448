"""Pairs of programs that train alike, in another library and in ours, and the pages that show how they differ.

``python tests/helpers/training_pairs.py`` writes the differences, and our programs, into the pages.
"""

import ast
import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples/coming_from"
PEERS = ("accelerate", "deepspeed", "fsdp2", "lightning", "trainer")
LANGUAGES = ("en", "zh-Hans")
_OPENINGS = {"diff": "```diff", "program": "```python file=train.py", "other": "```python file=before.py"}


def source(peer: str, side: str) -> str:
    """One side of a pair, ``before`` or ``after``."""
    return (PROGRAMS / f"{peer}_{side}.py").read_text(encoding="utf-8")


def page_of(peer: str, language: str) -> Path:
    """The page for readers who come from a library."""
    return ROOT / "docs/source" / language / f"tutorials/coming_from_{peer}.md"


def blocks(peer: str) -> dict[str, str]:
    """What the page of a library shows of its pair: how the programs differ, ours, and the other if it runs there."""
    before, after = (source(peer, side).splitlines(keepends=True) for side in ("before", "after"))
    difference = difflib.unified_diff(before, after, f"{peer}_before.py", "train.py", n=2)
    difference = (f"{line.rstrip()}\n" for line in difference)  # pages have no spaces at the ends of lines
    return {"diff": "".join(difference), "program": "".join(after), "other": "".join(before)}


def shown(text: str) -> dict[str, list[str]]:
    """The blocks of a page that show a pair."""
    return {name: _fence(opening).findall(text) for name, opening in _OPENINGS.items()}


def _fence(opening: str) -> re.Pattern[str]:
    return re.compile(rf"^{re.escape(opening)}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def calls_in_column(text: str, column: int) -> Iterator[str]:
    """What stands in backticks in a column of a page's tables and is an expression of Python."""
    for row in re.findall(r"^\| .* \|$", text, re.MULTILINE):
        cells = row.strip("| ").split(" | ")
        yield from (span for span in re.findall(r"`([^`]+)`", cells[column]) if _parse(span))


def unknown_names(call: str, roots: Mapping[str, Any]) -> list[str]:
    """The attributes and the keywords in an expression that what it names does not have.

    Args:
        call: The expression.
        roots: What names stand for: classes, where they are objects.
    """
    tree = _parse(call)
    assert tree is not None
    return [problem for node in ast.walk(tree) for problem in _problems(node, roots)]


def _parse(span: str) -> ast.Expression | None:
    try:
        return ast.parse(span, mode="eval")
    except SyntaxError:
        return None


def _problems(node: ast.AST, roots: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and _find(node.value, roots) is not None and _find(node, roots) is None:
        yield ast.unparse(node)
    if isinstance(node, ast.Call):
        target = _find(node.func, roots)
        if isinstance(node.func, ast.Name) and target is None and node.func.id != "range":
            yield f"{node.func.id}: what it is, the roots do not say"
        parameters = _parameters(target)
        if parameters and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            yield from (f"{ast.unparse(node.func)}({key.arg}=)" for key in node.keywords if key.arg not in parameters)


def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # nothing, or made in C
        return {}


def _find(node: ast.AST, roots: Mapping[str, Any]) -> Any:
    """What an expression names; None if nothing is known of it."""
    if isinstance(node, ast.Attribute):
        return getattr(_find(node.value, roots), node.attr, None)
    return roots.get(node.id) if isinstance(node, ast.Name) else None


def main() -> None:
    """Write the blocks of all pairs into the pages."""
    for peer in PEERS:
        for page in (page_of(peer, language) for language in LANGUAGES):
            text = page.read_text(encoding="utf-8")
            for name, block in blocks(peer).items():
                text = _fence(_OPENINGS[name]).sub(lambda _, full=f"{_OPENINGS[name]}\n{block}```": full, text)
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
