"""The project as the website presents it: its address, the commit that is shown."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from pagebuild.changes import git_output
from pagebuild.site.edition import BrokenInputError
from pagetest.finding import Finding

URL_SETTING = "Repository"
"""What the address is called in `[project.urls]` of pyproject.toml."""

_URL = re.compile(r"https://[^/\s?#@]+/[^\s?#@]+")

# [Note: where the code is on the web]
# pyproject.toml says it, and nothing else: a clone of a fork, or of a folder, knows a remote of its own, which is no
# place for readers. Without that setting pages have no edit links, and objects no links to their source.


@dataclass(frozen=True)
class Project:
    """What all pages say about the project."""

    repository: str  # its address on the web, without a slash at the end; empty where none is configured
    commit: str  # the commit that the site is built from; empty outside a repository
    date: str

    def edit_address(self, file: str) -> str | None:
        """Where a file of the project can be edited; None where no address is configured."""
        return f"{self.repository}/edit/main/{file}" if self.repository else None


def read_project(root: Path, date: str) -> Project:
    """Asks pyproject.toml for the address, and git for the commit; see [Note: where the code is on the web]."""
    return Project(_repository(root / "pyproject.toml"), git_output(root, "rev-parse", "HEAD"), date)


def _repository(file: Path) -> str:
    content = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    address = content.get("project", {}).get("urls", {}).get(URL_SETTING, "")
    if address and not _URL.fullmatch(address):
        message = f"{URL_SETTING} in [project.urls] is an address, such as https://host/team/project; found {address!r}"
        raise BrokenInputError(Finding(file, 1, message))
    return address.rstrip("/").removesuffix(".git")
