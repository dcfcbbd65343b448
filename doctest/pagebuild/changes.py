"""What a change touches: the files that differ from the commit it started from."""

import os
import subprocess
from pathlib import Path

from pagetest.graph.changes import changed_files

BASE_HELP = "the revision that a change is compared with (where the branch left main; on main the commit before)"

_MAIN_BRANCHES = ("origin/HEAD", "origin/main", "main")


def changed_files_since_base(root: Path, base: str = "") -> tuple[str, frozenset[Path] | None]:
    """The files that differ from the base of a change, committed or not."""
    # By default the base is the commit where this branch left the main one; on the main branch, the commit
    # before. Without a base (no repository, or a clone of a single commit) the result is "", None: anything may
    # have changed.
    found = base or _find_base(root)
    return found, changed_files(root, found) if found else None


def git_output(root: Path, *words: str) -> str:
    """What git prints; empty if there is no git, no repository or no such thing."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *words], cwd=root, env=outer, capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _find_base(root: Path) -> str:
    head = git_output(root, "rev-parse", "HEAD")
    bases = (git_output(root, "merge-base", branch, "HEAD") for branch in _MAIN_BRANCHES)
    left = next((base for base in bases if base and base != head), "")
    return left or git_output(root, "rev-parse", "--verify", "HEAD~1")
