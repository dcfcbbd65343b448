"""What differs from the commit that a change started from, in a clone of any depth."""

import subprocess
from pathlib import Path

import pytest

from pagebuild.changes import changed_files_since_base, git_output
from pagetest.finding import UsageError

pytestmark = pytest.mark.slow


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).write_text(f"{name} {len(git(folder, 'log', '--all', '--oneline').split())}\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    commit(root, "a")
    commit(root, "b")
    return root


def names(root: Path, base: str = "") -> set[str] | None:
    _, files = changed_files_since_base(root, base)
    return None if files is None else {path.name for path in files}


def test_on_the_main_branch_it_is_the_last_commit_and_what_is_not_committed(repository) -> None:
    assert changed_files_since_base(repository)[0] == git(repository, "rev-parse", "HEAD~1")
    assert names(repository) == {"b"}
    (repository / "new").touch()
    assert names(repository) == {"b", "new"}


def test_on_a_branch_it_is_all_since_it_left(repository) -> None:
    git(repository, "checkout", "-q", "-b", "topic")
    commit(repository, "c")
    commit(repository, "d")
    git(repository, "checkout", "-q", "main")
    commit(repository, "e")
    git(repository, "checkout", "-q", "topic")
    assert names(repository) == {"c", "d"}
    git(repository, "merge", "-q", "--no-edit", "main")
    assert names(repository) == {"c", "d"}


def test_a_fresh_clone_has_the_same_base_whether_a_branch_is_checked_out_or_a_commit(repository, tmp_path) -> None:
    git(repository, "checkout", "-q", "-b", "topic")
    commit(repository, "c")
    commit(repository, "d")
    git(repository, "checkout", "-q", "main")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), "clone")
    assert names(clone) == {"b"}
    git(clone, "checkout", "-q", "--detach", "origin/topic")
    assert names(clone) == {"c", "d"}


def test_a_clone_of_one_commit_has_no_base_and_neither_has_a_folder(repository, tmp_path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    assert changed_files_since_base(tmp_path / "shallow") == ("", None)
    (tmp_path / "shallow" / "new").touch()
    assert changed_files_since_base(tmp_path / "shallow") == ("", None)
    (tmp_path / "folder").mkdir()
    assert changed_files_since_base(tmp_path / "folder") == ("", None)


def test_a_base_that_is_given_counts_and_must_exist(repository) -> None:
    first = git(repository, "rev-parse", "HEAD~1")
    commit(repository, "c")
    assert names(repository, first) == {"b", "c"}
    with pytest.raises(UsageError, match="git knows no revision `nowhere`"):
        changed_files_since_base(repository, "nowhere")


def test_git_that_is_missing_prints_nothing(repository, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_output(repository, "rev-parse", "HEAD") == ""
    assert changed_files_since_base(repository) == ("", None)
