"""The project as the website presents it: its address, its version, the commit that is shown."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
    address = environment.get("DOCS_REPOSITORY") or web_address(_git(root, "remote", "get-url", "origin"))
    return Project(address.rstrip("/"), _git(root, "rev-parse", "HEAD"), date)


def web_address(remote: str) -> str:
    """The address of a remote on the web: by https, without a user, a password or `.git`."""
    match = _URL.fullmatch(remote) or _SCP.fullmatch(remote)
    return f"https://{match.group(1)}/{match.group(2).strip('/').removesuffix('.git')}" if match else NOWHERE


def _git(root: Path, *words: str) -> str:
    """What git answers; empty if there is no git, no repository or no such thing."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *words], cwd=root, env=outer, capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
