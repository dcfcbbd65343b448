"""What has changed in a working tree since a revision, as git sees it."""

import subprocess
from pathlib import Path

from pagetest.finding import UsageError

HEAD = "HEAD"

_SINCE_BRANCH = "..."


def changed_files(root: Path, revision: str = HEAD) -> frozenset[Path]:
    """The files that differ from a revision: committed since, changed, new or deleted."""
    # With `...` after it, a revision is the commit where this branch left it. Files outside the root do not
    # count.
    name = revision.removesuffix(_SINCE_BRANCH)
    commit = _resolve_commit(root, name)
    if revision.endswith(_SINCE_BRANCH):
        commit, _ = _git(root, "merge-base", commit, HEAD)
        if not commit:
            raise UsageError(f"{name} and {HEAD} have no commit in common: name the revision without `{_SINCE_BRANCH}`")
    differing, _ = _git(root, "diff", "--name-only", "--no-renames", "--no-ext-diff", "--relative", "-z", commit, "--")
    new, _ = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return frozenset(root / name for name in f"{differing}\0{new}".split("\0") if name)


def _resolve_commit(root: Path, name: str) -> str:
    try:
        inside, error = _git(root, "rev-parse", "--is-inside-work-tree")
    except OSError as fault:
        raise UsageError(f"--affected asks git what changed, and git cannot be run: {fault.strerror}") from None
    if inside != "true":
        raise UsageError(f"--affected asks git what changed in {root}, and git says: {error or 'no working tree'}")
    commit, _ = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if not commit:
        raise UsageError(f"git knows no revision `{name}`: give a commit, a branch or a tag")
    return commit


def _git(root: Path, *words: str) -> tuple[str, str]:
    """What git prints, nothing where it fails; and what it complains about."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, check=False)  # noqa: S607
    printed, error = (text.decode("utf-8", "surrogateescape").strip() for text in (done.stdout, done.stderr))
    return "" if done.returncode else printed, error
