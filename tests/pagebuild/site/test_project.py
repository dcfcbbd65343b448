"""Where the project is on the web."""

import subprocess

import pytest

from pagebuild.site.edition import BrokenInputError
from pagebuild.site.project import read_project

pytestmark = pytest.mark.slow

SETTING = '[project.urls]\nRepository = "{}"\n'


@pytest.mark.parametrize("end", ["", "/", ".git"])
def test_pyproject_says_where_the_code_is(tmp_path, end) -> None:
    (tmp_path / "pyproject.toml").write_text(SETTING.format(f"https://host.example/a/b{end}"))
    project = read_project(tmp_path, "2026-11-20")
    assert (project.repository, project.date) == ("https://host.example/a/b", "2026-11-20")
    assert project.edit_address("docs/x.md") == "https://host.example/a/b/edit/main/docs/x.md"


@pytest.mark.parametrize("content", [None, "", '[project]\nname = "x"\n', SETTING.format("")])
def test_without_the_setting_there_is_no_address_whatever_the_remote(tmp_path, content) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "remote", "add", "origin", "https://host.example/a/b"], cwd=tmp_path, check=True)
    if content is not None:
        (tmp_path / "pyproject.toml").write_text(content)
    project = read_project(tmp_path, "d")
    assert (project.repository, project.commit) == ("", "")
    assert project.edit_address("docs/x.md") is None


@pytest.mark.parametrize(
    "address", ["git@host.example:a/b", "https://host.example", "https://user:secret@host.example/a/b", "/srv/git/b"]
)
def test_an_address_that_no_reader_can_follow_is_an_error(tmp_path, address) -> None:
    (tmp_path / "pyproject.toml").write_text(SETTING.format(address))
    with pytest.raises(BrokenInputError, match=r"pyproject\.toml:1: Repository in \[project\.urls\] is an address"):
        read_project(tmp_path, "d")
