"""Rules against hidden failures: code that could hide one, or reads as what it is not, is refused before it runs."""

import ast
import builtins
import io
import tokenize
import unicodedata
from collections.abc import Iterator
from contextlib import suppress

from pagetest.finding import Finding
from pagetest.model.instrument import EXPECT_ERROR, MARK, PROBE
from pagetest.model.page import Page
from pagetest.model.script import Script

_BROAD_EXCEPTIONS = ("AssertionError", "Exception", "BaseException", "ExceptionGroup", "BaseExceptionGroup")
_EXITS = (ast.Return, ast.Break, ast.Continue)
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_VISIBLE_CONTROLS = "\t\u200d"  # a joiner of emojis
_UNKNOWN = (ast.Name, ast.Attribute, ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.Starred, ast.Subscript)


def hidden_characters(page: Page, _script: Script) -> Iterator[Finding]:
    """Characters that cannot be seen, or change the order of what is seen, anywhere on the page."""
    for number, line in enumerate(page.lines, 1):
        for character in line:
            if unicodedata.category(character) in {"Cc", "Cf", "Zl", "Zp"} and character not in _VISIBLE_CONTROLS:
                name = unicodedata.name(character, "a control character")
                message = (
                    f"U+{ord(character):04X} ({name}) cannot be seen, and may show other text than there is: drop it"
                )
                yield Finding(page.path, number, message)


def confusable_names(page: Page, script: Script) -> Iterator[Finding]:
    """Names that may look like others; text and comments are free."""
    if script.fault:
        return
    for token in tokenize.generate_tokens(io.StringIO(script.text).readline):
        if token.type == tokenize.NAME and not token.string.isascii():
            message = f"the name `{token.string}` has letters that may look like others: write it in ASCII"
            yield Finding(page.path, token.start[0], message)


def empty_asserts(page: Page, script: Script) -> Iterator[Finding]:
    """Asserts that hold whatever the code does."""
    for node in script.nodes:
        if isinstance(node, ast.Assert) and _constant_truth(node.test):
            what = f"`{ast.unparse(node.test)}`"
            yield Finding(page.path, node.lineno, f"{what} is always true, so this asserts nothing: compare a result")


def hidden_expectations(page: Page, script: Script) -> Iterator[Finding]:
    """An `expect_error` that has no body of its own, or another name: whether its body raised may be hidden."""
    heads = [node.items[0].context_expr for node in script.nodes if isinstance(node, ast.With) and len(node.items) == 1]
    allowed = {id(head.func) for head in heads if isinstance(head, ast.Call)}
    for node in script.nodes:
        is_import = isinstance(node, ast.alias) and not node.asname
        names = {getattr(node, field, None) for field in ("id", "attr", "name")}
        if EXPECT_ERROR in names and not is_import and id(node) not in allowed:
            message = (
                f"`{EXPECT_ERROR}` checks the body of its own `with`: import it by name, `with {EXPECT_ERROR}(...):`"
            )
            yield Finding(page.path, getattr(node, "lineno", 1), message)


def broad_handlers(page: Page, script: Script) -> Iterator[Finding]:
    """What would catch a failing check as well; such names are for raising, deriving and annotating."""
    allowed = {id(name) for node in script.nodes for place in _allowed_uses(node) for name in ast.walk(place)}
    for node in script.nodes:
        name = next((getattr(node, field) for field in ("id", "attr", "name") if hasattr(node, field)), "")
        is_bare = isinstance(node, ast.ExceptHandler) and node.type is None
        if is_bare or (name in _BROAD_EXCEPTIONS and id(node) not in allowed):
            what = "`except:`" if is_bare else f"`{name}`"
            message = f"{what} catches the errors of failing checks too: name the exceptions that are expected here"
            yield Finding(page.path, getattr(node, "lineno", 1), message)


def finally_exits(page: Page, script: Script) -> Iterator[Finding]:
    """A `finally` that is left drops the exception that led there."""
    for node in script.nodes:
        if isinstance(node, ast.Try | ast.TryStar):
            for leaving in _exits(node.finalbody, in_loop=False):
                word = type(leaving).__name__.lower()
                message = f"`{word}` in a `finally` drops the exception that led there: leave after it"
                yield Finding(page.path, leaving.lineno, message)


def shadowed_names(page: Page, script: Script) -> Iterator[Finding]:
    """Names of Python's own, and of the harness, that the page takes."""
    for node in script.nodes:
        for name in _bound_names(node):
            if hasattr(builtins, name) and not name.startswith("_"):
                message = f"`{name}` is Python's own, and a check that uses it would prove nothing: take another name"
                yield Finding(page.path, getattr(node, "lineno", 1), message)
        words = [*_bound_names(node), getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "value", "")]
        if any(isinstance(word, str) and word.startswith((PROBE, MARK)) for word in words):
            yield Finding(
                page.path, getattr(node, "lineno", 1), f"names like `{PROBE}` are the harness's: take another"
            )


def _constant_truth(node: ast.expr) -> bool | None:
    """Whether an expression is true or false whatever the code does; None where that depends."""
    truth = None
    match node:
        case ast.Lambda() | ast.GeneratorExp():
            truth = True
        case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts) | ast.Dict(parts):
            truth = any(part and not isinstance(part, ast.Starred) for part in parts) or (None if parts else False)
        case ast.JoinedStr(parts):
            truth = any(isinstance(part, ast.Constant) and part.value for part in parts) or None
        case ast.NamedExpr(_, value):
            truth = _constant_truth(value)
        case ast.UnaryOp(ast.Not(), value):
            truth = None if (inner := _constant_truth(value)) is None else not inner
        case ast.BoolOp(operator, values):
            truth = _combined_truth([_constant_truth(value) for value in values], decisive=isinstance(operator, ast.Or))
        case _ if not any(isinstance(part, _UNKNOWN) for part in ast.walk(node)):
            with suppress(Exception):
                truth = bool(eval(compile(ast.Expression(node), "assert", "eval"), {}))  # noqa: S307 (constants only)
    return truth


def _combined_truth(truths: list[bool | None], decisive: bool) -> bool | None:
    if decisive in truths:
        return decisive
    return None if None in truths else not decisive


def _allowed_uses(node: ast.AST) -> Iterator[ast.AST]:
    """Where the name of a broad exception catches nothing."""
    if isinstance(node, ast.Raise) and node.exc:
        yield node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    if isinstance(node, ast.ClassDef):
        yield from node.bases
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"isinstance", "issubclass"}:
        yield from node.args
    yield from filter(None, (getattr(node, field, None) for field in ("annotation", "returns")))


def _exits(nodes: list[ast.stmt], in_loop: bool) -> Iterator[ast.stmt]:
    for node in nodes:
        if isinstance(node, ast.Return) or (isinstance(node, _EXITS) and not in_loop):
            yield node
        if not isinstance(node, _OWN_SCOPE):
            parts = [
                part for part in ast.iter_child_nodes(node) if isinstance(part, ast.ExceptHandler | ast.match_case)
            ]
            below = [child for part in (node, *parts) for child in ast.iter_child_nodes(part)]
            statements = [child for child in below if isinstance(child, ast.stmt)]
            yield from _exits(statements, in_loop or isinstance(node, _LOOPS))


def _bound_names(node: ast.AST) -> Iterator[str]:
    """The names that a node binds, but for parameters, which are seen where they are used."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    if isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name


RULES = (
    hidden_characters,
    confusable_names,
    empty_asserts,
    hidden_expectations,
    broad_handlers,
    finally_exits,
    shadowed_names,
)
