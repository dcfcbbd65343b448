"""Instrumentation: marks between the statements of a script, in memory only, record what ran and what was hidden."""

import ast
from bisect import bisect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from pagetest.model.script import Script

PROBE = "__page__"
MARK = "__mark_"
MESSAGES = ("msg", "err_msg")
EXPECT_ERROR = "expect_error"  # the context manager of `colossal.testing` whose body must raise
DEVICES = ("cpu", "cuda", "is_available")

_NO_EFFECT = (ast.Pass, ast.Global, ast.Nonlocal)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# [Note: marks]
# What ran is known from marks, not from sys.settrace: a trace function slows every Python call of the process (a
# quarter of a second for `import torch` alone), and loses a line when os._exit ends the process. The mark of a
# statement is `global __mark_7__; __mark_7__ = True` before it, in memory only: it costs one dictionary store,
# works in threads, forks and compiled functions, and leaves the file, its line numbers and its tracebacks alone. Every
# statement has one, so two on one line are distinguished. In an expression the mark is a call, `__page__.ran(7) or
# value`: in lambdas, and in what a generator expression, or any comprehension of an assert, evaluates first.

# [Note: hidden failures]
# A check that fails must fail the page, whoever catches its AssertionError: an except, a `with`, a thread pool. So
# every function of the page, and every body of its `try` and `with`, notes the AssertionErrors that leave it, and
# raises them again. What an assert, or a call such as `assert_close(a, b)` or `expect_error(E)`, has come to goes
# through `__page__.checked`, which looks whether the checks themselves are still those that were imported.

# [Note: block marks]
# Which block printed what is learnt from calls `__page__.block(12)`: "what comes now belongs to the block whose code
# starts at line 12". One stands before every statement at which another block begins; never inside a function,
# for what a function prints belongs to the block that calls it.


@dataclass(frozen=True)
class Mark:
    """A place in the script."""

    line: int
    required: str = ""  # what it is, if it must be reached on some rank at least
    # The number of the mark of the statement that it is part of; if that is not reached, it need not be.
    parent: int = -1


@dataclass(frozen=True)
class InstrumentedCode:
    """The script's code with its marks; see [Note: marks]."""

    code: CodeType
    marks: tuple[Mark, ...]
    last: int  # the number of the mark of the last statement

    @property
    def names(self) -> list[str]:
        """The variables of the marks, in their order."""
        return [f"{MARK}{number}__" for number in range(len(self.marks))]


def statement_lines(marks: Sequence[Mark]) -> list[int]:
    """The lines on which a statement starts that does something when it is reached."""
    return sorted({mark.line for mark in marks})


def unreached_marks(marks: Sequence[Mark], reached: Collection[int]) -> Iterator[Mark]:
    """The marks that must be reached, and were not."""
    for number, mark in enumerate(marks):
        if mark.required and number not in reached and (mark.parent < 0 or mark.parent in reached):
            yield mark


def executed_lines(marks: Sequence[Mark], reached: Collection[int]) -> list[int]:
    """The lines of which all marks were reached."""
    missed = {mark.line for number, mark in enumerate(marks) if number not in reached}
    return [line for line in statement_lines(marks) if line not in missed]


def instrument_script(script: Script, filename: str, blocks: Sequence[int] = ()) -> InstrumentedCode:
    """Compiles the script with marks."""
    # `blocks` are the first lines of the page's blocks, if these are to be marked; see [Note: block marks].
    marker, tree = _Instrumenter(), script.tree
    if blocks:
        _mark_blocks(tree, 0, blocks)
    tree = marker.visit(tree)
    code = compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True, optimize=0)
    return InstrumentedCode(code, tuple(marker.marks), marker.last)


class _Instrumenter(ast.NodeTransformer):
    """Puts marks into a tree."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.last = -1
        self.statement = -1
        self.is_in_assert = False
        self.is_optional = False

    def visit(self, node: ast.AST) -> Any:
        """Marks the node, and what is below it."""
        if not isinstance(node, ast.stmt) or not has_effect(node) or _is_block_mark(node):
            return super().visit(node)
        mark = self._statement_mark(node, "assert" if _is_check(node) else "")
        with self._set_state(statement=len(self.marks) - 1):
            return [*mark, super().visit(node)]

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """The last statement's mark shows that the page came to its end."""
        self.generic_visit(node)
        stores = [each.targets[0] for each in node.body if isinstance(each, ast.Assign)]
        names = [name.id for name in stores if isinstance(name, ast.Name) and name.id.startswith(MARK)]
        self.last = int(names[-1].strip("_").rpartition("_")[2]) if names else -1
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        """Its body must run, and hide no failure."""
        first = next((each for each in node.body if has_effect(each)), None)
        self.generic_visit(node)
        if first:
            start = 1 if ast.get_docstring(node, clean=False) is not None else 0
            mark = self._statement_mark(first, f"function `{node.name}`")
            node.body[start:] = [*mark, *_report_assertion_errors(node.body[start:])]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Try(self, node: Any) -> Any:
        """What its handlers, or its end, could hide is recorded before."""
        self.generic_visit(node)
        for part in (node, *node.handlers):
            part.body = _report_assertion_errors(part.body)
        node.orelse = _report_assertion_errors(node.orelse)
        return node

    visit_TryStar = visit_Try  # noqa: N815

    def visit_With(self, node: Any) -> Any:
        """What its context managers could hide is recorded before; one that checks is looked at as an assert is."""
        is_check = _is_check(node)
        self.generic_visit(node)
        node.body = _report_assertion_errors(node.body)
        if is_check:
            node.items[0].context_expr = _probe_call("checked", node.items[0].context_expr)
        return node

    visit_AsyncWith = visit_With  # noqa: N815

    def visit_If(self, node: ast.If) -> ast.If:
        """A branch that another device takes need not run on this one."""
        node.test = self.visit(node.test)
        with self._set_state(is_optional=self.is_optional or _tests_device(node.test)):
            node.body = [new for each in node.body for new in _as_list(self.visit(each))]
            node.orelse = [new for each in node.orelse for new in _as_list(self.visit(each))]
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        """What is asserted is looked at, and no comprehension in it may be empty; its message need not be made."""
        with self._set_state(is_in_assert=True):
            node.test = _probe_call("checked", self.visit(node.test))
        with self._set_state(is_optional=True):
            node.msg = self.visit(node.msg) if node.msg else None
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        """The message of a check need not be made either."""
        with self._set_state(is_optional=self.is_optional or node.arg in MESSAGES):
            self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        """A call that checks is looked at as an assert is."""
        is_check = _is_check(node)
        self.generic_visit(node)
        if is_check:
            node.value = _probe_call("checked", node.value)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        """Its body must run, unless it is a mere value."""
        is_value = isinstance(node.body, ast.Constant | ast.Name)
        with self._set_state(is_in_assert=False):
            self.generic_visit(node)
        if not is_value:
            node.body = self._expression_mark(node.body, "lambda")
        return node

    def _comprehension(self, node: Any) -> Any:
        is_lazy, must_run = isinstance(node, ast.GeneratorExp), self.is_in_assert
        self.generic_visit(node)
        if is_lazy or must_run:
            first, *others = node.generators
            what = "generator expression" if is_lazy else "comprehension"
            owner, name = (others[0], "iter") if others else (node, "key" if isinstance(node, ast.DictComp) else "elt")
            if first.ifs:
                first.ifs[0] = self._expression_mark(first.ifs[0], what)
            else:
                setattr(owner, name, self._expression_mark(getattr(owner, name), what))
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    @contextmanager
    def _set_state(self, **states: int) -> Iterator[None]:
        before = {name: getattr(self, name) for name in states}
        vars(self).update(states)
        yield
        vars(self).update(before)

    def _mark(self, node: ast.AST, must: str, within: int = -1) -> int:
        self.marks.append(Mark(getattr(node, "lineno", 1), "" if self.is_optional else must, within))
        return len(self.marks) - 1

    def _statement_mark(self, node: ast.AST, must: str) -> list[ast.stmt]:
        name = f"{MARK}{self._mark(node, must)}__"
        store = ast.Assign([ast.Name(name, ast.Store())], ast.Constant(value=True))
        return [ast.copy_location(ast.Global([name]), node), ast.copy_location(store, node)]

    def _expression_mark(self, node: ast.expr, must: str) -> ast.expr:
        call = ast.copy_location(_probe_call("ran", ast.Constant(value=self._mark(node, must, self.statement))), node)
        return ast.copy_location(ast.BoolOp(ast.Or(), [call, node]), node)


def has_effect(node: ast.stmt) -> bool:
    """Whether a statement does something when it is reached."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.ImportFrom):
        return node.module != "__future__"
    return not isinstance(node, _NO_EFFECT)


def _is_check(node: ast.stmt) -> bool:
    """Whether a statement is an assert, calls what is named like one, or expects an error."""
    if isinstance(node, ast.With | ast.AsyncWith):
        return _called_name(node.items[0].context_expr) == EXPECT_ERROR
    value = node.value if isinstance(node, ast.Expr) else None
    value = value.value if isinstance(value, ast.Await) else value
    return isinstance(node, ast.Assert) or _called_name(value).startswith("assert")


def _called_name(node: ast.expr | None) -> str:
    """The name of what an expression calls, without what it belongs to; empty if it is no call."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_block_mark(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name)))):
            return name == PROBE
    return False


def _tests_device(test: ast.expr) -> bool:
    words = (getattr(node, field, "") for node in ast.walk(test) for field in ("value", "attr", "id"))
    return any(word in DEVICES for word in words if isinstance(word, str))


def _report_assertion_errors(body: list[ast.stmt]) -> list[ast.stmt]:
    """The body, with a note of each AssertionError that leaves it; see [Note: hidden failures]."""
    if not body:
        return body
    note = ast.Expr(_probe_call("assertion_failed"))
    handler = ast.ExceptHandler(ast.Name("AssertionError", ast.Load()), None, [note, ast.Raise()])
    guard = ast.copy_location(ast.Try(body, [handler], [], []), body[0])
    guard.end_lineno, guard.end_col_offset = body[-1].end_lineno, body[-1].end_col_offset
    return [guard]


def _probe_call(name: str, *arguments: ast.expr) -> ast.Call:
    call = ast.Call(ast.Attribute(ast.Name(PROBE, ast.Load()), name, ast.Load()), list(arguments), [])
    return ast.copy_location(call, arguments[0]) if arguments else call


def _as_list(nodes: Any) -> list[Any]:
    return nodes if isinstance(nodes, list) else [nodes]


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
        if block != current and has_effect(statement):
            call = _probe_call("block", ast.Constant(value=blocks[block - 1]))
            marked.append(ast.copy_location(ast.Expr(call), statement))
            current = block
        marked.append(statement)
        if bisect(blocks, statement.end_lineno or 0) != block and not isinstance(statement, _FUNCTIONS):
            _mark_blocks(statement, 0, blocks)
            current = 0
    return marked
