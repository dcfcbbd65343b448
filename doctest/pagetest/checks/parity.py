"""Parity: a translation has the structure and the code of its original; only the text differs."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from pagetest.finding import Finding, display_path
from pagetest.model.page import Page
from pagetest.model.script import make_script
from pagetest.outputs.blocks import outputs_of

_LOGGING = ("debug", "info", "warning", "error", "critical", "exception")
_SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BODIES = ("body", "handlers", "orelse", "finalbody", "cases")


@dataclass(frozen=True)
class Parity:
    """How a translation compares with its original."""

    findings: tuple[Finding, ...]  # the differences that are not allowed
    same_code: bool  # whether the code is one and the same, so that one run proves both
    outputs: tuple[Finding, ...] = ()


def compare_structure(original: Page, translation: Page) -> Parity:
    """Compares two pages of one name."""
    # The texts that a program prints may be translated (in `print`, logging calls and the messages of asserts);
    # then the code is allowed, but it is not the same.
    findings = list(_structure_differences(original, translation))
    ours, theirs = make_script(original), make_script(translation)
    if findings or ours.fault or theirs.fault:
        return Parity(tuple(findings), same_code=False)
    if ast.dump(_without_docstrings(ours.tree)) == ast.dump(_without_docstrings(theirs.tree)):
        return Parity((), True, tuple(_output_differences(original, translation)))
    lines = _first_difference(_without_printed_text(ours.tree).body, _without_printed_text(theirs.tree).body)
    if lines:
        findings.append(_finding(translation, lines[1], original, lines[0], "code"))
    return Parity(tuple(findings), same_code=False)


def _output_differences(original: Page, translation: Page) -> Iterator[Finding]:
    for ours, theirs in zip(outputs_of(original), outputs_of(translation), strict=True):
        texts = [output.block.source.split("\n") for output in (ours, theirs)]
        for index, (one, other) in enumerate(zip_longest(*texts)):
            if one != other:
                where = f"{display_path(original.path)}:{ours.block.line + index}"
                message = f"this is not the output at {where}, and the code is the same: write what that page says"
                yield Finding(translation.path, theirs.block.line + index, message)
                break


def _structure_differences(original: Page, translation: Page) -> Iterator[Finding]:
    """The first difference of each kind."""
    for what, ours, theirs in zip(_PART_NAMES, _parts(original), _parts(translation), strict=True):
        for one, other in zip_longest(ours, theirs):
            if not one or not other or one[0] != other[0]:
                last = (len(original.lines), len(translation.lines))
                yield _finding(translation, other[1] if other else last[1], original, one[1] if one else last[0], what)
                break


_PART_NAMES = (
    "kind, reading time or devices",
    "heading level",
    "command",
    "request to run alone",
    "autodoc hook",
    "block of code, its role or its ignored region",
    "ignored code",
    "transcript or file",
    "alert",
    "set of tabs",
    "output block",
)


def _parts(page: Page) -> tuple[list[tuple[object, int]], ...]:
    """Per kind of part, what must agree and where it stands."""
    return (
        [(page.front and (page.front.kind, page.front.minutes, page.front.devices), 1)],
        [(heading.level, heading.line) for heading in page.headings],
        [(note.text, note.line) for note in page.commands],
        [("", note.line) for note in page.exclusive],
        [(note.text, note.line) for note in page.hooks],
        [((block.ignored, block.role, block.file), block.line) for block in page.blocks if block.is_code],
        [(_without_comments(block.source), block.line) for block in page.python if block.ignored],
        [(_without_comments(block.source), block.line) for block in page.shell],
        [(alert.kind, alert.line) for alert in page.alerts],
        [((tabs.group, len(tabs.tabs)), tabs.line) for tabs in page.tabs],
        [((page.executed.index(output.code), output.is_exact), output.block.line) for output in outputs_of(page)],
    )


def _finding(translation: Page, line: int, original: Page, original_line: int, what: str) -> Finding:
    where = f"{display_path(original.path)}:{original_line}"
    return Finding(translation.path, line, f"the first {what} that differs from {where}: translate only the text")


def _without_comments(source: str) -> str:
    """The code of an ignored block; its text without comment lines where it is not a complete program."""
    try:
        return ast.dump(_without_printed_text(ast.parse(source)))
    except (SyntaxError, ValueError):
        lines = (line.partition("#")[0].rstrip() for line in source.split("\n"))
        return "\n".join(line for line in lines if line)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """The tree without docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, _SCOPES) and node.body and _is_text(node.body[0]):
            node.body = node.body[1:]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _without_printed_text(tree: ast.Module) -> ast.Module:
    """The tree without docstrings and without the text of what it prints."""
    for node in ast.walk(_without_docstrings(tree)):
        if isinstance(node, ast.Call) and _prints(node.func):
            for part in ast.walk(node):
                _mask_text(part)
        elif isinstance(node, ast.Assert) and node.msg:
            for part in ast.walk(node.msg):
                _mask_text(part)
    return tree


def _prints(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr in _LOGGING and "log" in ast.unparse(function.value).lower()
    return isinstance(function, ast.Name) and function.id == "print"


def _mask_text(node: ast.AST) -> None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node.value = ""
    elif isinstance(node, ast.JoinedStr):
        node.values = [value for value in node.values if isinstance(value, ast.FormattedValue)]


def _first_difference(ours: list, theirs: list) -> tuple[int, int] | None:
    """The lines of the first statements that differ, innermost; where one side has ended, its last line."""
    for one, other in zip_longest(ours, theirs):
        if one is None or other is None:
            return (_line(one or ours[-1:]), _line(other or theirs[-1:]))
        if ast.dump(one) != ast.dump(other):
            bodies = ((getattr(one, name, None), getattr(other, name, None)) for name in _BODIES)
            inner = (_first_difference(a, b) for a, b in bodies if isinstance(a, list) and isinstance(b, list))
            return next((lines for lines in inner if lines), (_line(one), _line(other)))
    return None


def _line(node: ast.AST | list[ast.AST]) -> int:
    """The line of a statement, a handler, a case, or the last one of a list."""
    if isinstance(node, list):
        return _line(node[-1]) if node else 1
    return getattr(node.pattern if isinstance(node, ast.match_case) else node, "lineno", 1)
