"""The static rules: what a page must fulfil before it is run."""

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from pagetest.checks import hidden_failures
from pagetest.checks.command import command_faults
from pagetest.checks.usage import usage_faults
from pagetest.finding import Finding
from pagetest.model.page import PYTHON, SHELL, Page
from pagetest.model.script import Script
from pagetest.outputs.blocks import output_faults

_FIXED_PORT_URL = re.compile(r"(?:tcp|env)://[^/\s]*:[1-9]\d*")
_SCRIPT = re.compile(r"[\w./-]+\.py")
_PORT_NAMES = ("port", "master_port")
_REQUIRED_PACKAGES = ("colossal", "numpy", "torch", "transformers")


def check_page(page: Page, script: Script) -> list[Finding]:
    """Everything that forbids to run the page, in the order of its lines."""
    found = [*page.findings, *output_faults(page)]
    found += [script.fault] if script.fault else []
    found += [
        Finding(page.path, page.commands[-1].line if page.commands else page.command_line, message)
        for message in command_faults(page)
    ]
    found += [finding for rule in _RULES for finding in rule(page, script)]
    return sorted(set(found))


def _shadowed_module(page: Page, script: Script) -> Iterator[Finding]:
    """A script shadows every module of its name, since its folder comes first on the path."""
    if script.is_empty:
        return
    if page.stem in sys.stdlib_module_names:
        yield Finding(
            page.path, 1, f"`{page.stem}.py` would shadow the standard library's `{page.stem}`: rename the page"
        )
    elif page.stem in {*_REQUIRED_PACKAGES, *_missing_imports(script)} or _is_installed(page.stem):
        yield Finding(page.path, 1, f"`{page.stem}.py` would shadow the package `{page.stem}`: rename the page")


def _missing_imports(script: Script) -> set[str]:
    names = set()
    for node in script.nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name) if name.isidentifier() and name not in sys.modules else None
    return name in sys.modules or bool(spec and spec.origin)


def _fixed_ports(page: Page, script: Script) -> Iterator[Finding]:
    """A fixed port in the code collides with the next run as one in the command does."""
    for node in script.nodes:
        if fixed := _fixed_port(node):
            message = f"`{fixed}` fixes a port that another run may hold: let the launcher choose it, or use 0"
            yield Finding(page.path, getattr(node, "lineno", 1), message)


def _fixed_port(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FIXED_PORT_URL.search(node.value):
        return node.value
    if isinstance(node, ast.keyword):
        return f"{node.arg}=" if node.arg in _PORT_NAMES and _is_port(node.value) else ""
    names, values = _key_value_pairs(node)
    fixed = any(
        isinstance(name, ast.Constant) and name.value == "MASTER_PORT" and _is_port(value)
        for name, value in zip(names, values, strict=False)
    )
    return "MASTER_PORT" if fixed else ""


def _key_value_pairs(node: ast.AST) -> tuple[list[ast.expr | None], list[ast.expr]]:
    """Keys and values: of a dictionary, an assignment to an item, or a call such as `setdefault(key, value)`."""
    if isinstance(node, ast.Dict):
        return node.keys, node.values
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return [node.targets[0].slice], [node.value]
    if isinstance(node, ast.Call):
        return [*node.args[:1]], node.args[1:2]
    return [], []


def _is_port(node: ast.expr) -> bool:
    """Whether the node is a number other than 0, as such or quoted."""
    return isinstance(node, ast.Constant) and str(node.value).isdecimal() and int(str(node.value)) > 0


def _unknown_roles(page: Page, _script: Script) -> Iterator[Finding]:
    """What stands after the language of code says what it is for; anything else would be ignored."""
    for block in page.blocks:
        if block.language in PYTHON and not block.role:
            known = "`python`, `python check`, `python figure` or `python file=NAME`"
            yield Finding(page.path, block.line - 1, f"`{block.info}` is no kind of code: write {known}")
        elif block.language in SHELL and block.info_words and not block.role:
            message = f"`{block.info}` is no kind of code: write `shell run`, or `shell` for what is not run"
            yield Finding(page.path, block.line - 1, message)


def _written_files(page: Page, _script: Script) -> Iterator[Finding]:
    """A file is written into the page's folder, and something uses it."""
    later = "\n".join(block.source for block in page.executed)
    for block in page.shell:
        if not block.file:
            continue
        path = PurePosixPath(block.file)
        if path.is_absolute() or ".." in path.parts or not _SCRIPT.fullmatch(block.file):
            message = f"`{block.file}` is no file below the page's folder: write a relative path such as `train.py`"
            yield Finding(page.path, block.line - 1, message)
        elif block.file == f"{page.stem}.py":
            yield Finding(page.path, block.line - 1, f"`{block.file}` is the program of the page: take another name")
        elif path.name not in later and path.stem not in later:
            message = f"nothing runs `{block.file}`: add a `shell run` block that does, or drop `file=`"
            yield Finding(page.path, block.line - 1, message)


_RULES: tuple[Callable[[Page, Script], Iterator[Finding]], ...] = (
    _shadowed_module,
    _fixed_ports,
    _unknown_roles,
    _written_files,
    usage_faults,
    *hidden_failures.RULES,
)
