"""What readers take away from a page: its program, and the notebook with its outputs."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pagetest.checks.command import NO_COMMAND
from pagetest.model.page import Page

WIDTH = 100


def downloadable_script(page: Page, source: str, version: str) -> str:
    """The page's program with the headings of the page as comments; empty for a page that runs nothing."""
    if not page.runnable:
        return ""
    how = f"# Run it: {page.command}" if page.command != NO_COMMAND else ""
    parts = ["\n".join(line for line in (f"# The program of {source}, colossal {version}.", how) if line)]
    last = 0
    for block in page.runnable:
        passed = [heading for heading in page.headings if last < heading.line < block.line and heading.level > 1]
        parts += [_heading_comment(heading.text) for heading in passed[-1:]]
        parts.append(block.source.rstrip("\n"))
        last = block.line
    return "\n\n".join(parts) + "\n"


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
