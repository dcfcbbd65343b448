"""The rules for pages of each kind: what a reader wants to use stands first, alone and complete."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pagetest.finding import Finding
from pagetest.model.page import CHECK, FIGURE, FILE, HOW_TO, RUN, TUTORIAL, USAGE, Block, Page
from pagetest.model.script import Script

USAGE_KINDS = (TUTORIAL, HOW_TO)
MIN_USAGE_FRACTION = 0.9
MIN_USAGE_OF_ALL_CODE = 0.5
FIRST_SCREEN_LINES = 60
MAX_HOW_TO_LINES = 300

_COMPARISON = re.compile(r"assert\w*|allclose|array_equal|equal|isclose|expect_\w+|draw_figure|SavedTensorCounter")
_DRAWING = ("matplotlib", "colossal.testing")
_USEFUL = ("fake_world", "find_storages")  # what programs use: to plan for ranks that they lack, and to measure
_MAKE_FIGURES = ("subplots", "figure")
_STEPS = ("backward", "execute_pipeline")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

# [Note: what counts as usage]
# A line of code counts if it is not blank and no comment. In `python` blocks it is usage unless it belongs to a
# statement that asserts, compares, expects an error, counts bytes, or uses matplotlib or colossal.testing, or that
# defines a function which does so, or which only checks and figures call. Lines of `file=` and `shell run` blocks are
# usage. `python check` and `python figure` blocks are not.


def usage_faults(page: Page, script: Script) -> Iterator[Finding]:
    """Where a tutorial or how-to shows its checks in the place of usage, or its usage too late."""
    if page.front is None or page.front.kind not in USAGE_KINDS or script.fault:
        return
    lines = CodeLines(page, script)
    first = next((block.line for block in page.blocks if block.role in {USAGE, FILE, RUN} and not block.ignored), None)
    if first and first > FIRST_SCREEN_LINES:
        message = (
            f"the first usage stands below line {FIRST_SCREEN_LINES}: show what the page is for on the first screen"
        )
        yield Finding(page.path, first, message)
    count = len(page.lines) - (not page.lines[-1])
    if page.front.kind == HOW_TO and count > MAX_HOW_TO_LINES:
        message = f"a how-to has at most {MAX_HOW_TO_LINES} lines, this one {count}: split it"
        yield Finding(page.path, MAX_HOW_TO_LINES, message)
    yield from _fraction_faults(page, lines)
    yield from _loop_faults(page, script)


def _fraction_faults(page: Page, lines: "CodeLines") -> Iterator[Finding]:
    plain, others = lines.of_role(USAGE), lines.of_role(CHECK, FIGURE)
    checking = sorted(plain & lines.checking)
    if len(checking) > (1 - MIN_USAGE_FRACTION) * len(plain):
        where = ", ".join(map(str, checking[:5])) + (", ..." if len(checking) > 5 else "")  # noqa: PLR2004
        message = f"{len(checking)} of {len(plain)} lines in `python` blocks check or draw (lines {where})"
        yield Finding(page.path, checking[0], f"{message}: move them to `python check` and `python figure` blocks")
    usage = len(plain - lines.checking) + len(lines.of_role(FILE, RUN))
    total = len(plain) + len(others) + len(lines.of_role(FILE, RUN))
    if usage < MIN_USAGE_OF_ALL_CODE * total:
        message = f"{usage} of {total} lines of code are usage, at least half must be"
        yield Finding(page.path, 1, f"{message}: move checks to an internals page or to tests")


def _loop_faults(page: Page, script: Script) -> Iterator[Finding]:
    """A page that trains shows the loop itself, not only a function that holds it."""
    usage = _lines_of(page, lambda block: block.role == USAGE and not block.ignored)
    files = [ast.parse(block.source) for block in page.shell if block.file]
    steps = [node for node in script.nodes if _is_step(node) and getattr(node, "lineno", 0) in usage]
    in_files = [node for tree in files for node in ast.walk(tree) if _is_step(node)]
    plain = [node for tree in (script.tree, *files) for node in _top_level(tree) if _is_step(node)]
    if (steps or in_files) and not plain:
        line = getattr(steps[0], "lineno", 1) if steps else page.shell[0].line
        yield Finding(page.path, line, "the training loop stands inside a function only: show it once at top level")


@dataclass(frozen=True)
class CodeLines:
    """The lines of code of a page, by what they are for; see [Note: what counts as usage]."""

    page: Page
    script: Script

    def of_role(self, *roles: str) -> frozenset[int]:
        """The lines of the blocks of a role that hold code."""
        lines = _lines_of(self.page, lambda block: block.role in roles and not block.ignored)
        return frozenset(number for number in lines if _is_code(self.page.lines[number - 1]))

    @cached_property
    def checking(self) -> frozenset[int]:
        """The lines of statements of the program that check or draw."""
        drawing = {name for node in self.script.nodes for name in _drawing_names(node)}
        helpers = self._helpers(drawing)
        found: set[int] = set()
        for node in self.script.nodes:
            if isinstance(node, ast.stmt) and (_checks(node, drawing) or getattr(node, "name", "") in helpers):
                found |= set(range(_first_line(node), (node.end_lineno or node.lineno) + 1))
        return frozenset(found)

    def _helpers(self, drawing: set[str]) -> set[str]:
        """The functions that check or draw, and those that nothing but checks and figures use."""
        top = self.script.tree.body  # not methods, which are called by attributes
        functions = {node.name: node for node in top if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        usage = self.of_role(USAGE)
        used = self._names_used_on(usage)
        names = {
            name
            for name, node in functions.items()
            if node.lineno in usage
            and any(_checks(part, drawing) for part in ast.walk(node) if isinstance(part, ast.stmt))
        }
        return names | {name for name, node in functions.items() if node.lineno in usage and name not in used}

    def _names_used_on(self, lines: frozenset[int]) -> set[str]:
        inner: Mapping[str, range] = {
            node.name: range(node.lineno, (node.end_lineno or 0) + 1)
            for node in self.script.nodes
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        names = ((node.id, node.lineno) for node in self.script.nodes if isinstance(node, ast.Name))
        return {name for name, line in names if line in lines and line not in inner.get(name, ())}


def _lines_of(page: Page, wanted: Callable[[Block], bool]) -> set[int]:
    return {line for block in page.blocks if wanted(block) for line in range(block.line, block.end)}


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _checks(node: ast.stmt, drawing: set[str]) -> bool:
    """Whether a statement, without the blocks below it, asserts, compares, expects an error or draws."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Import | ast.ImportFrom):
        return bool(set(_drawing_names(node)))
    if isinstance(node, _FUNCTIONS):
        return False
    heads = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt | ast.ExceptHandler)]
    for part in (each for head in heads for each in ast.walk(head)):
        if isinstance(part, ast.Call) and _COMPARISON.fullmatch(_name_of(part.func)):
            return True
        if isinstance(part, ast.Name) and part.id in drawing:
            return True
    return False


def _drawing_names(node: ast.AST) -> Iterator[str]:
    """The names that stand for matplotlib, and for what it makes: figures and axes."""
    if isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names if _draws(alias.name))
    elif isinstance(node, ast.ImportFrom) and node.module and _draws(node.module):
        yield from (alias.asname or alias.name for alias in node.names if alias.name not in _USEFUL)
    elif isinstance(node, ast.Assign) and _makes_figure(node.value):
        yield from (part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name))


def _makes_figure(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _name_of(value.func) in _MAKE_FIGURES


def _draws(module: str) -> bool:
    return module.startswith(_DRAWING)


def _name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_step(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name_of(node.func) in _STEPS


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are in no function."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTIONS):
            yield from _top_level(child)
