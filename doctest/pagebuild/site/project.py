"""The project as the website presents it: its address, its version, the commit that is shown."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagebuild.changes import git_output

NOWHERE = "https://example.org/colossal"

_SCP = re.compile(r"(?:[^@/]+@)?([^:/]+):(?!//)(.+)")
_URL = re.compile(r"(?:https?|ssh|git)://(?:[^@/]+@)?([^/:]+)(?::\d+)?/(.+)")


@dataclass(frozen=True)
class Project:
    """What all pages say about the project.

    Attributes:
        repository: Its address on the web, without a slash at the end.
        commit: The commit that the site is built from; empty outside a repository.
        date: The day of the build.
    """

    repository: str
    commit: str
    date: str

    def edit_address(self, file: str) -> str:
        """Where a file of the project can be edited.

        Args:
            file: Its path from the root of the project.
        """
        return f"{self.repository}/edit/main/{file}"


def read_project(root: Path, environment: Mapping[str, str], date: str) -> Project:
    """Asks the environment, then git.

    Args:
        root: The project's root.
        environment: `DOCS_REPOSITORY` in it is the address, for a clone of a fork or a mirror.
        date: The day of the build.
    """
    address = environment.get("DOCS_REPOSITORY") or web_address(git_output(root, "remote", "get-url", "origin"))
    return Project(address.rstrip("/"), git_output(root, "rev-parse", "HEAD"), date)


def web_address(remote: str) -> str:
    """The address of a remote on the web: by https, without a user, a password or `.git`."""
    match = _URL.fullmatch(remote) or _SCP.fullmatch(remote)
    return f"https://{match.group(1)}/{match.group(2).strip('/').removesuffix('.git')}" if match else NOWHERE
