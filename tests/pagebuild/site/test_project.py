"""Where the project is on the web."""

import subprocess

import pytest

from pagebuild.site.project import NOWHERE, read_project, web_address


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://example.com/team/colossal.git", "https://example.com/team/colossal"),
        ("https://example.com/team/colossal/", "https://example.com/team/colossal"),
        ("https://name:secret@example.com/team/colossal.git", "https://example.com/team/colossal"),
        ("git@example.com:team/colossal.git", "https://example.com/team/colossal"),
        ("ssh://git@example.com:2222/team/colossal.git", "https://example.com/team/colossal"),
        ("", NOWHERE),
        ("/srv/git/colossal", NOWHERE),
        ("file:///srv/git/colossal", NOWHERE),
    ],
)
def test_a_remote_has_an_address_without_its_secrets(remote, address) -> None:
    assert web_address(remote) == address


def test_the_environment_comes_first_then_the_remote(tmp_path) -> None:
    assert read_project(tmp_path, {}, "d").commit == ""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "remote", "add", "origin", "git@example.com:a/b.git"], cwd=tmp_path, check=True)
    assert read_project(tmp_path, {}, "d").repository == "https://example.com/a/b"
    project = read_project(tmp_path, {"DOCS_REPOSITORY": "https://mirror.example.com/c/"}, "d")
    assert project.edit_address("docs/x.md") == "https://mirror.example.com/c/edit/main/docs/x.md"
