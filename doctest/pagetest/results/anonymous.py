"""What a page printed, without the paths, the host and the user of the machine on which it ran."""

import getpass
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

_HOME = "/home/user"
_GENERIC_NAMES = ("", "localhost", "root", "user", "host")
"""Names that tell nothing about a machine, and that stand in many texts."""


def remove_private_names(text: str, root: Path, folder: Path, page: str) -> str:
    """The text as it would be on a reader's machine.

    Args:
        text: What the page printed.
        root: The project's root.
        folder: Where the page ran.
        page: The page's own text: a word that stands there, such as the `vm` of a formula, names no machine.
    """
    for name, replacement in _replacements(root, folder).items():
        text = text.replace(name, replacement)
    for name, replacement in ((platform.node(), "host"), (_user(), "user")):
        word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
        if name not in _GENERIC_NAMES and not word.search(page):
            text = word.sub(replacement, text)
    return text


def _replacements(root: Path, folder: Path) -> Mapping[str, str]:
    """What stands for each path, the longest first: one may lie in another."""
    places = {
        folder: f"{_HOME}/tutorial",
        Path(sys.prefix): f"{_HOME}/venv",
        Path(sys.base_prefix): "/usr",
        root: f"{_HOME}/colossal",
        Path.home(): _HOME,
    }
    known = {str(path): text for path, text in places.items() if len(path.parts) > 1}
    return dict(sorted(known.items(), key=lambda item: -len(item[0])))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return ""
