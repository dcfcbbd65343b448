"""Rewriting: new text inside the output blocks of a page's file, and nothing else changed."""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pagetest.finding import Finding
from pagetest.model.page import Block, Page
from pagetest.outputs.merging import merge_output
from pagetest.outputs.shown import outputs_of

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z")
_FENCE = re.compile(r"`{3,}|~{3,}")


class OutputUpdateError(Exception):
    """A page cannot be rewritten; `finding` says where and why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def updated_texts(page: Page, printed: Mapping[int, str]) -> dict[Block, str]:
    """The text that each stale output block should have, from what each Python block printed.

    A block of which nothing was printed is left alone: it should go, and only its author can decide that.
    """
    found = {}
    for output in outputs_of(page):
        text = printed.get(output.python.line, "")
        fresh = merge_output(output.block.source, text, output.is_exact)
        if text.strip() and fresh != output.block.source:
            found[output.block] = fresh
    return found


def write_outputs(page: Page, texts: Mapping[Block, str]) -> None:
    """Puts the texts into the page's file, in one step.

    Raises:
        RewritingError: The file has changed since the page was read, or a text does not fit into its fence.
    """
    raw = page.path.read_bytes().decode("utf-8", errors="surrogateescape")
    lines = _LINE.findall(raw)
    if [line.rstrip("\r\n") for line in lines] != _lines_in_file(page, raw):
        raise OutputUpdateError(
            Finding(page.path, 1, "the page is no longer what ran, and is left alone: run it again")
        )
    for block, text in sorted(texts.items(), key=lambda item: -item[0].line):
        lines[block.line - 1 : block.end - 1] = _fence_lines(page, block, text, lines)
    _replace_file(page.path, "".join(lines).encode("utf-8", errors="surrogateescape"))


def _lines_in_file(page: Page, raw: str) -> list[str]:
    """The page's lines as they stand in the file, where the first may hold a byte order mark."""
    lines = list(page.lines if page.lines[-1] else page.lines[:-1])
    return [f"\ufeff{line}" if raw.startswith("\ufeff") and not index else line for index, line in enumerate(lines)]


def _fence_lines(page: Page, block: Block, text: str, lines: list[str]) -> list[str]:
    """The text's lines with what stands before the fence, such as `> `, and with its line end."""
    opening, closing = lines[block.line - 2], lines[block.end - 1]
    fence = _FENCE.search(closing)
    assert fence, "the reader refuses a page with an open fence"
    if any(line.lstrip(" ").startswith(fence.group()) for line in text.split("\n")):
        message = f"the output holds the fence `{fence.group()}`: give this block a longer one"
        raise OutputUpdateError(Finding(page.path, block.line - 1, message))
    prefix, end = closing[: fence.start()], opening[len(opening.rstrip("\r\n")) :]
    return [f"{prefix}{line}".rstrip() + end for line in text.removesuffix("\n").split("\n")]


def _replace_file(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}.", delete=False) as file:
        file.write(content)
    os.chmod(file.name, path.stat().st_mode)  # noqa: PTH101
    Path(file.name).replace(path)
