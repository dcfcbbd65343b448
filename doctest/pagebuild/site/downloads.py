"""What readers take away from a page: its program, and the notebook with its outputs."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pagetest.command import NO_COMMAND
from pagetest.page import Page

WIDTH = 100


def script(page: Page, source: str, version: str) -> str:
    """The page's program with the headings of the page as comments; empty for a page that runs nothing.

    Args:
        page: The page.
        source: Its file, from the root of the project.
        version: The version of the library that the page belongs to.
    """
    if not page.runnable:
        return ""
    how = f"# Run it: {page.command}" if page.command != NO_COMMAND else ""
    parts = ["\n".join(line for line in (f"# The program of {source}, colossal {version}.", how) if line)]
    last = 0
    for block in page.runnable:
        passed = [heading for heading in page.headings if last < heading.line < block.line and heading.level > 1]
        parts += [_rule(heading.text) for heading in passed[-1:]]
        parts.append(block.source.rstrip("\n"))
        last = block.line
    return "\n\n".join(parts) + "\n"


def page_hash(page: Page) -> str:
    """Stands for the text of a page: a notebook that carries another one was made from another text."""
    return hashlib.sha256("\n".join(page.lines).encode()).hexdigest()[:16]


def notebook(file: Path, page: Page) -> bytes | None:
    """The executed notebook, unless there is none or it was made from another text of the page.

    Args:
        file: Where the notebook would be.
        page: The page as it is now.
    """
    if not file.is_file():
        return None
    content = file.read_bytes()
    made: dict[str, Any] = json.loads(content)["metadata"].get("colossal", {})
    return content if made.get("page_hash") == page_hash(page) else None


def _rule(text: str) -> str:
    """A heading as a comment that the eye finds."""
    return f"# --- {text} " + "-" * max(0, WIDTH - len(text) - 7)
