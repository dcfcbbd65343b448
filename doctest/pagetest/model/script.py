"""The program of a page, and its transcript: line N of the script is line N of the Markdown, in Python and in shell."""

import ast
import hashlib
import warnings
from dataclasses import dataclass
from functools import cached_property

from pagetest.finding import Finding
from pagetest.model.page import Block, Page


@dataclass(frozen=True)
class Script:
    """What a page runs: a shell its transcripts, once, and then the page's command its program."""

    text: str  # the program; blank wherever the Markdown holds no runnable Python
    fault: Finding | None
    shell: tuple[Block, ...] = ()  # the transcripts, and the files that they use

    @property
    def is_empty(self) -> bool:
        """Whether the page has nothing to run."""
        return not self.has_program and not self.shell

    @property
    def has_program(self) -> bool:
        """Whether there is Python for the page's command."""
        return bool(self.text.strip())

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
        source += "".join(f"\0{block.file}\0{block.source}" for block in self.shell)
        return hashlib.sha256(source.encode()).hexdigest()[:16]


def make_script(page: Page) -> Script:
    """Pads the page's runnable blocks so that every line keeps its number, and compiles them."""
    lines = [""] * len(page.lines)
    for block in page.runnable:
        content = block.source.split("\n")[:-1]
        lines[block.line - 1 : block.line - 1 + len(content)] = content
    text = "\n".join(lines)
    files = [(block.source, block.line) for block in page.shell if block.file]
    faults = (_syntax_fault(source, page, line) for source, line in ((text, 1), *files))
    return Script(text, next(filter(None, faults), None), page.shell)


def _syntax_fault(text: str, page: Page, first: int) -> Finding | None:
    try:
        with warnings.catch_warnings():
            for kind in (SyntaxWarning, DeprecationWarning):  # of an escape that does not exist, before Python 3.12
                warnings.simplefilter("error", kind)
            compile(text, str(page.path), "exec", dont_inherit=True, optimize=0)
    except SyntaxError as error:
        return Finding(page.path, first - 1 + (error.lineno or 1), f"{type(error).__name__}: {error.msg}")
    except ValueError as error:
        return Finding(page.path, first, f"the code cannot be compiled: {error}")
    return None
