"""The script of a page: line N of the script is line N of the Markdown."""

import ast
import hashlib
import warnings
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType

from pagetest.finding import Finding
from pagetest.model.page import Page

_SILENT = (ast.Pass, ast.Global, ast.Nonlocal)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (ast.Module, ast.ClassDef, *_FUNCTIONS)


@dataclass(frozen=True)
class Script:
    """What a page runs.

    Attributes:
        text: The source; blank wherever the Markdown holds no runnable Python.
        fault: The syntax error, if the source has one.
    """

    text: str
    fault: Finding | None

    @property
    def is_empty(self) -> bool:
        """Whether the page has nothing to run."""
        return not self.text.strip()

    @property
    def tree(self) -> ast.Module:
        """The syntax tree, made anew for whoever will change it; comments are not part of it."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, to be read only; none if there is a syntax error."""
        return () if self.fault else tuple(ast.walk(self.tree))

    @property
    def code_hash(self) -> str:
        """The same for two pages whose code differs in comments and blank lines only."""
        source = self.text if self.fault else ast.unparse(self.tree)
        return hashlib.sha256(source.encode()).hexdigest()[:16]


def make_script(page: Page) -> Script:
    """Pads the page's runnable blocks so that every line keeps its number, and compiles them."""
    lines = [""] * len(page.lines)
    for block in page.runnable:
        content = block.source.split("\n")[:-1]
        lines[block.line - 1 : block.line - 1 + len(content)] = content
    text = "\n".join(lines)
    return Script(text, _fault(text, page))


def _fault(text: str, page: Page) -> Finding | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            compile(text, str(page.path), "exec", dont_inherit=True, optimize=0)
    except SyntaxError as error:
        return Finding(page.path, error.lineno or 1, f"{type(error).__name__}: {error.msg}")
    except ValueError as error:
        return Finding(page.path, 1, f"the code cannot be compiled: {error}")
    return None


# [Note: line marks]
# Which lines ran is learnt from marks, not from sys.settrace: a trace function slows every Python call of the process
# (a quarter of a second for `import torch` alone), and loses a line when os._exit ends the process. A mark is the
# statement `global __line_7__; __line_7__ = True` in front of line 7, in memory only: it costs one dictionary store,
# works in threads, forks and compiled functions, and leaves the file, its line numbers and its tracebacks alone.


@dataclass(frozen=True)
class MarkedCode:
    """The script's code with a mark before every statement, and the line each mark stands for."""

    code: CodeType
    marks: dict[str, int]


# [Note: block marks]
# Which block printed what is learnt from calls `__block__(12)`, in memory only too: "what comes now belongs to the
# block whose code starts at line 12". One stands in front of every statement at which another block begins; never
# inside a function, for what a function prints belongs to the block that calls it.


def mark_lines(script: Script, filename: str, blocks: Sequence[int] = ()) -> MarkedCode:
    """Compiles the script with marks; see [Note: line marks].

    Args:
        script: The script.
        filename: What tracebacks name.
        blocks: The first lines of the page's blocks, if these are to be marked; see [Note: block marks].
    """
    tree, marks = script.tree, {}
    _mark(tree, set(), marks)
    if blocks:
        _mark_blocks(tree, 0, blocks)
    return MarkedCode(compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True, optimize=0), marks)


def executable_lines(script: Script) -> tuple[int, ...]:
    """The lines on which a statement starts that does something when it is reached."""
    marks: dict[str, int] = {}
    _mark(script.tree, set(), marks)
    return tuple(sorted(marks.values()))


def _mark(node: ast.AST, seen: set[int], marks: dict[str, int]) -> None:
    """Puts marks into every body below the node; one line is marked once per scope."""
    scope = set() if isinstance(node, _SCOPES) else seen
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            for child in value:
                if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                    _mark(child, scope, marks)
            if value and isinstance(value[0], ast.stmt):
                setattr(node, name, [new for child in value for new in _with_mark(child, scope, marks)])


def _with_mark(node: ast.stmt, scope: set[int], marks: dict[str, int]) -> list[ast.stmt]:
    if node.lineno in scope or not _does_something(node):
        return [node]
    scope.add(node.lineno)
    name = f"__line_{node.lineno}__"
    marks[name] = node.lineno
    store = ast.Assign([ast.Name(name, ast.Store())], ast.Constant(value=True))
    return [ast.copy_location(ast.Global([name]), node), ast.copy_location(store, node), node]


def _mark_blocks(node: ast.AST, current: int, blocks: Sequence[int]) -> None:
    """Marks where the block changes in every body below a node that is reached in block `current`; 0 is unknown."""
    for name, body in ast.iter_fields(node):
        if not isinstance(body, list):
            continue
        if body and isinstance(body[0], ast.stmt):
            setattr(node, name, _with_block_marks(body, current, blocks))
        for child in body:
            if isinstance(child, ast.ExceptHandler | ast.match_case):
                _mark_blocks(child, current, blocks)


def _with_block_marks(body: list[ast.stmt], current: int, blocks: Sequence[int]) -> list[ast.stmt]:
    marked: list[ast.stmt] = []
    for statement in body:
        block = bisect(blocks, statement.lineno)
        if block != current and _does_something(statement):
            call = ast.Call(ast.Name("__block__", ast.Load()), [ast.Constant(value=blocks[block - 1])], [])
            marked.append(ast.copy_location(ast.Expr(call), statement))
            current = block
        marked.append(statement)
        if bisect(blocks, statement.end_lineno or 0) != block and not isinstance(statement, _FUNCTIONS):
            _mark_blocks(statement, 0, blocks)
            current = 0
    return marked


def _does_something(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.ImportFrom):
        return node.module != "__future__"
    return not isinstance(node, _SILENT)
