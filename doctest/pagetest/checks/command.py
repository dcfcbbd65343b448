"""The command of a page: which commands are accepted, and what is wrong with the others."""

import re
import shlex
from collections.abc import Callable, Iterator

from pagetest.model.page import Page

NO_COMMAND = "none"

_SHELL = re.compile(r"[;|&<>`]|\$\(")
_PORT_FLAG = re.compile(r"--(?:master[_-]port|rdzv[_-]endpoint)(?:=(.*))?")
_ISOLATION = re.compile(r"-[a-zA-Z]*[IES]")
_OPTIMIZED = re.compile(r"-[a-zA-Z]*O+")


def command_faults(page: Page) -> Iterator[str]:
    """What is wrong with the page's command, one message per fault."""
    if not page.commands:
        yield (
            "a page names the command that runs it, and this one has none: add "
            f"`<!-- doc-test-command: torchrun --standalone --nproc_per_node=1 {page.stem}.py -->`, "
            "or `none` on a page without Python"
        )
    elif len(page.commands) > 1:
        first = page.commands[0].line
        yield f"a page has one command; another stands at line {first}: keep one, or make two pages"
    elif page.command == NO_COMMAND:
        yield from _none_faults(page)
    elif not page.runnable:
        yield f"there is no Python to run here, yet the command is `{page.command}`: write `none`"
    else:
        yield from _run_faults(page)


def _none_faults(page: Page) -> Iterator[str]:
    if page.runnable:
        line = page.runnable[0].line
        yield f"the command is `none`, but line {line} holds Python that nothing would run: give the page a command"


def _run_faults(page: Page) -> Iterator[str]:
    try:
        words = shlex.split(page.command)
    except ValueError as error:
        yield f"the command cannot be split into arguments ({error}): close its quotes"
        return
    if not words or words[0] not in _HEADS:
        head = words[0] if words else ""
        yield f"`{head}` does not run the page's code: use torchrun, python or colossal run"
        return
    if _SHELL.search(page.command):
        yield "no shell runs the command, yet it holds `;`, `|`, `&`, `<`, `>`, `$(` or a backquote: write a plain one"
    yield from _HEADS[words[0]](words)
    yield from _port_faults(words)
    yield from _script_faults(words, page)


def _torchrun_faults(words: list[str]) -> Iterator[str]:
    if "--standalone" not in words:
        yield "torchrun without `--standalone` takes a fixed port that another run may hold: add `--standalone`"


def _python_faults(words: list[str]) -> Iterator[str]:
    if words[1:3] == ["-m", "torch.distributed.run"]:
        yield from _torchrun_faults(words)
        return
    for word in words[1:]:
        if not word.startswith("-"):
            return
        if word in {"-c", "-m"} or _ISOLATION.fullmatch(word):
            yield f"`python {word}` runs something else than the page, or hides it from the harness: drop `{word}`"
        if _OPTIMIZED.fullmatch(word):
            yield f"`python {word}` switches asserts off: drop `{word}`"


def _colossal_faults(words: list[str]) -> Iterator[str]:
    if words[1:2] != ["run"]:
        yield "`colossal` runs a page through `colossal run`: write that"


def _port_faults(words: list[str]) -> Iterator[str]:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        match = _PORT_FLAG.fullmatch(word)
        if match and (match.group(1) or following).rpartition(":")[2] != "0":
            yield f"`{word}` fixes a port that another run may hold: drop it, `--standalone` finds a free one"


def _script_faults(words: list[str], page: Page) -> Iterator[str]:
    scripts = [word for word in words if word.endswith(".py")]
    if scripts != [f"{page.stem}.py"]:
        found = ", ".join(scripts) or "no script"
        yield f"the command of this page runs `{page.stem}.py`, and names {found}: write `{page.stem}.py`"


_HEADS: dict[str, Callable[[list[str]], Iterator[str]]] = {
    "torchrun": _torchrun_faults,
    "python": _python_faults,
    "colossal": _colossal_faults,
}
