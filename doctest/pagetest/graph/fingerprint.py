"""The fingerprint of a page: it changes with the page's code, its command, and the project files that it reaches."""

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pagetest.graph.imports import ImportGraph
from pagetest.graph.references import References
from pagetest.model.page import Page
from pagetest.model.script import Script, make_script

HARNESS = ("doctest/pagetest", "docs_test.py", "constraints.txt")
"""What every page is run with."""

DEVICE_FILES = {"pretend": "tests/device/pretend_device"}
"""What pages on a device also depend on: the project's own device."""

_COMMAND_MODULES = {"colossal": "colossal.cli"}
"""The modules of the project's own commands, as which a transcript calls them."""
_WORD = re.compile(rf"^\s*(?:[A-Z_]+=\S+ +)*({'|'.join(_COMMAND_MODULES)})\b", re.MULTILINE)
_MODULE = re.compile(r"\bpython3? (?:-\S+ )*-m ([\w.]+)")

_NATIVE = (".h", ".hpp", ".cpp", ".cu", ".cuh")


def fingerprint(page: Page, graph: ImportGraph) -> str:
    """Computes the fingerprint of a page without importing anything; empty for a page without code."""
    script = make_script(page)
    if script.is_empty:
        return ""
    parts = [script.code_hash, page.command]
    for path in sorted(graph.reached(references_of(script))):
        parts += [path.relative_to(graph.source).as_posix(), _content_hash(path)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def common_inputs(root: Path, device: str = "") -> str:
    """The hash of the files that every page depends on: the harness, the tested versions, the code in C++ and CUDA."""
    files = [*_common_files(root), *_device_files(root, device)]
    parts = [text for path in files for text in (path.relative_to(root).as_posix(), _content_hash(path))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _common_files(root: Path) -> Iterator[Path]:
    for part in HARNESS:
        found = [root / part] if (root / part).is_file() else sorted((root / part).rglob("*.py"))
        yield from (path for path in found if path.is_file())
    for part in ("csrc", "src"):
        yield from sorted(path for path in (root / part).rglob("*") if path.suffix in _NATIVE)


def _device_files(root: Path, device: str) -> Iterator[Path]:
    if folder := DEVICE_FILES.get(device):
        yield from sorted(path for path in (root / folder).glob("*") if path.suffix in {".py", *_NATIVE})


def references_of(script: Script) -> References:
    """What a page's code refers to, files and commands included; nothing where it cannot be compiled."""
    if script.fault:
        return References(ast.Module([], []))
    files = [ast.parse(block.source) for block in script.shell if block.file]
    commands = "\n".join(block.source for block in script.shell if not block.file)
    modules = [*_MODULE.findall(commands), *(_COMMAND_MODULES[word] for word in _WORD.findall(commands))]
    called = [ast.Expr(ast.Constant(name)) for name in modules]
    return References(ast.Module([*script.tree.body, *(node for file in files for node in file.body), *called], []))


def _content_hash(path: Path) -> str:
    facts = path.stat()
    return _hash_file(path, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=4096)
def _hash_file(path: Path, _changed_ns: int, _size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
