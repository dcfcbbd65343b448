"""What readers take away from a page: its program, what it does in a shell, and the notebook with its outputs."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pagetest.checks.command import NO_COMMAND
from pagetest.model.page import Block, Page

DOWNLOADS = {"script": ".py", "shell": ".sh", "notebook": ".ipynb"}
"""What there may be, each with the suffix of its file."""
WIDTH = 100


def downloadable_files(page: Page, source: str, version: str) -> dict[str, str]:
    """By suffix, the page's program, and what it does in a shell before it, with the page's headings as comments."""
    found, origin = {}, f"{source}, colossal {version}."
    if page.runnable:
        how = f"# Run it: {page.command}" if page.command != NO_COMMAND else ""
        head = "\n".join(line for line in (f"# The program of {origin}", how) if line)
        found[".py"] = "\n\n".join([head, *_with_headings(page, page.runnable)]) + "\n"
    if page.shell:
        head = f"#!/usr/bin/env bash\n# The files and commands of {origin}\nset -eE -o pipefail"
        found[".sh"] = "\n\n".join([head, *_with_headings(page, page.shell)]) + "\n"
    return found


def _with_headings(page: Page, blocks: Iterable[Block]) -> Iterator[str]:
    last = 0
    for block in blocks:
        passed = [heading for heading in page.headings if last < heading.line < block.line and heading.level > 1]
        yield from (_heading_comment(heading.text) for heading in passed[-1:])
        yield _file_command(block) if block.file else block.source.rstrip("\n")
        last = block.line


def _file_command(block: Block) -> str:
    """The command that writes a file; no line of the file ends it."""
    end = "END"
    while end in block.source.split("\n"):
        end += "_"
    return f"mkdir -p \"$(dirname {block.file})\"; cat > {block.file} <<'{end}'\n{block.source}{end}"


def notebook_origin(page: Page, present: str) -> dict[str, str]:
    """What a notebook was made from: a page with another origin has other outputs."""
    text_hash = hashlib.sha256("\n".join(page.lines).encode()).hexdigest()[:16]
    return {"page": page.name, "lang": page.language, "text_hash": text_hash, "fingerprint": present}


def executed_notebook(file: Path, page: Page, present: str) -> bytes | None:
    """The executed notebook, unless there is none or it was made from another text or executed with other code."""
    if not file.is_file():
        return None
    content = file.read_bytes()
    made: dict[str, Any] = json.loads(content)["metadata"].get("colossal", {})
    return content if made | notebook_origin(page, present) == made else None


def _heading_comment(text: str) -> str:
    """A heading as a comment that the eye finds."""
    return f"# --- {text} " + "-" * max(0, WIDTH - len(text) - 7)
