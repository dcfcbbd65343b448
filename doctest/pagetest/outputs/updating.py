"""Updating: new text inside the output blocks of a page's file, and nothing else changed."""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pagetest.finding import Finding
from pagetest.model.page import Block, Page
from pagetest.model.reader import read_page
from pagetest.outputs.blocks import outputs_of, stale_outputs
from pagetest.outputs.library_texts import has_other_texts
from pagetest.outputs.merging import merge_output
from pagetest.results.result import FAIL, PASS, Result

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z")
_FENCE = re.compile(r"`{3,}|~{3,}")


class OutputUpdateError(Exception):
    """A page cannot be rewritten; `finding` says where and why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def updated_texts(page: Page, printed: Mapping[int, str]) -> dict[Block, str]:
    """The text that each stale output block should have, from what each block printed."""
    # A block of which nothing was printed is left alone: it should go, and only its author can decide that.
    found = {}
    for output in outputs_of(page):
        text = printed.get(output.code.line, "")
        fresh = merge_output(output.block.source, text, output.is_exact)
        if text.strip() and fresh != output.block.source:
            found[output.block] = fresh
    return found


def write_outputs(page: Page, texts: Mapping[Block, str]) -> None:
    """Puts the texts into the page's file, in one step."""
    raw = page.path.read_bytes().decode("utf-8", errors="surrogateescape")
    lines = _LINE.findall(raw)
    if [line.rstrip("\r\n") for line in lines] != _lines_in_file(page, raw):
        raise OutputUpdateError(
            Finding(page.path, 1, "the page is no longer what ran, and is left alone: run it again")
        )
    for block, text in sorted(texts.items(), key=lambda item: -item[0].line):
        lines[block.line - 1 : block.end - 1] = _fence_lines(page, block, text, lines)
    replace_file(page.path, "".join(lines).encode("utf-8", errors="surrogateescape"))


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


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file in one step."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}.", delete=False) as file:
        file.write(content)
    os.chmod(file.name, path.stat().st_mode)  # noqa: PTH101
    Path(file.name).replace(path)


def update_outputs(page: Page, result: Result, original: Page, before: Result | None) -> tuple[Result, Page]:
    """Rewrites the stale output blocks of a page that ran, or whose original did; any other failure forbids it."""
    # `original` is the page of the same name that ran first, as it is now, and `before` its result; for that page
    # itself they are the page and None. Returns the result that the page has now, and the page as it is now.
    ran = before if before and result.is_shared else result
    if ran.failure or not ran.log or has_other_texts(page):
        return result, page
    texts = _texts_from_original(original, page) if result.is_shared else updated_texts(page, result.printed)
    return _rewrite(page, texts, result) if texts else (result, page)


def _texts_from_original(original: Page, page: Page) -> dict[Block, str]:
    """What the output blocks of a translation with the same code must say where they do not."""
    pairs = zip(outputs_of(original), outputs_of(page), strict=True)
    return {theirs.block: ours.block.source for ours, theirs in pairs if ours.block.source != theirs.block.source}


def _rewrite(page: Page, texts: Mapping[Block, str], result: Result) -> tuple[Result, Page]:
    try:
        write_outputs(page, texts)
    except OutputUpdateError as error:
        return replace(result, status=FAIL, findings=(error.finding, *result.findings)), page
    new, count = read_page(page.path, page.language, page.name), len(texts)
    if result.is_shared:
        return replace(result, outputs_rewritten=count), new
    stale = tuple(stale_outputs(new, _printed_by_new_line(page, new, result.printed)))
    matched = result.outputs_total - len(stale)
    status = FAIL if stale else PASS
    return replace(result, status=status, findings=stale, outputs_matched=matched, outputs_rewritten=count), new


def _printed_by_new_line(page: Page, new: Page, printed: Mapping[int, str]) -> dict[int, str]:
    """What each block printed, by its line in the rewritten page."""
    pairs = zip(page.executed, new.executed, strict=True)
    return {after.line: printed[before.line] for before, after in pairs if before.line in printed}
