"""Which pages the browser opens: those whose text, pictures or documented objects a change touches."""

import shutil
import subprocess
from typing import Any

import pytest

from pagebuild.site import touched
from pagebuild.site.touched import find_touched_pages

pytestmark = pytest.mark.slow

LESSONS = {"/docs/basics/lesson/", "/zh-Hans/docs/basics/lesson/"}
REFERENCE = {"/docs/api/things/", "/zh-Hans/docs/api/things/"}
OPENINGS = {"/docs/api/", "/zh-Hans/docs/api/"}
TALKS = {"/docs/talk/", "/zh-Hans/docs/talk/"}


def git(docs: Any, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=docs.root, capture_output=True, check=True)


def commit(docs: Any) -> None:
    git(docs, "add", "-A", "-f")
    git(docs, "commit", "-q", "-m", "x", "--allow-empty")


@pytest.fixture
def project(docs) -> Any:
    git(docs, "init", "-q", "-b", "main")
    docs.write("src/pack/__init__.py", "")
    commit(docs)
    commit(docs)
    return docs


@pytest.mark.parametrize(
    ("file", "pages"),
    [
        ("docs/source/en/talk.md", {"/docs/talk/"}),
        ("docs/source/zh-Hans/talk.md", {"/zh-Hans/docs/talk/"}),
        ("docs/source/en/images/figure.svg", {"/docs/basics/lesson/"}),
        ("src/pack/__init__.py", LESSONS | REFERENCE),
        ("README.md", set()),
    ],
)
def test_a_change_touches_the_pages_that_show_its_files(project, file, pages) -> None:
    path = project.root / file
    path.write_text(path.read_text(encoding="utf-8") + "\nmore\n", encoding="utf-8")
    assert set(find_touched_pages(project.root).pages or ()) == pages
    commit(project)
    found = find_touched_pages(project.root)
    assert set(found.pages or ()) == pages
    assert found.reason.startswith("those that differ from ")


@pytest.mark.parametrize(
    "file", ["docs/website/src/css/base.css", "doctest/pagebuild/site/front_matter.py", "doctest/pagebuild/runs.py"]
)
def test_the_websites_own_code_touches_every_page(project, file) -> None:
    project.write(file, "")
    assert find_touched_pages(project.root).pages is None
    assert f"every page, since {file} differs" in find_touched_pages(project.root).reason


def test_where_nothing_is_known_a_sample_is_opened_that_no_commit_changes(docs, monkeypatch) -> None:
    assert set(find_touched_pages(docs.root).pages or ()) == LESSONS | REFERENCE | OPENINGS | TALKS
    monkeypatch.setattr(touched, "SAMPLE", 2)
    monkeypatch.setattr(touched, "changed_files_since_base", lambda *_: ("", None))
    before = find_touched_pages(docs.root)
    assert len(before.pages or ()) == 2
    git(docs, "init", "-q", "-b", "main")
    commit(docs)
    assert find_touched_pages(docs.root) == before


def test_a_released_version_has_its_address_and_changes_with_its_own_files(project) -> None:
    folder = project.root / "docs/versioned/0.1.0"
    shutil.copytree(project.root / "docs/source", folder)
    shutil.copy(project.root / "build/docs/api.json", folder)
    project.write("docs/versioned/0.1.0/sidebars.json", {})
    (folder / "verified").mkdir()
    project.write("docs/versions.json", ["current", "0.1.0"])
    commit(project)
    commit(project)
    project.write("docs/versioned/0.1.0/en/talk.md", "# Other\n")
    project.write("docs/source/zh-Hans/talk.md", "# Other\n")
    assert set(find_touched_pages(project.root).pages or ()) == {"/docs/talk/", "/zh-Hans/docs/next/talk/"}
    commit(project)
    project.write("src/pack/__init__.py", "x = 1\n")
    assert set(find_touched_pages(project.root, "HEAD").pages or ()) == {
        page.replace("/docs/", "/docs/next/") for page in LESSONS | REFERENCE
    }
