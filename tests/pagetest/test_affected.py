"""From changed files to the pages that they affect, and why."""

import subprocess
from pathlib import Path

import pytest

from pagetest import cli

pytestmark = pytest.mark.slow

FILES = {
    "src/lib/__init__.py": "",
    "src/lib/engine.py": "from lib.base import Base\nclass Engine(Base): ...\n",
    "src/lib/base.py": "class Base:\n    def save(self): ...\n",
    "src/lib/other.py": "",
    "doctest/pagetest/cli.py": "",
    "docs_test.py": "",
    "constraints.txt": "",
    "README.md": "",
    "docs/source/en/images/plot.svg": "<svg/>",
    ".gitignore": "build/\n",
}
PAGES = {
    "imports": "```python\nimport lib.engine\n```\n\n<!-- doc-test-command: python imports.py -->\n",
    "part/hooks": "{{ autodoc:lib.engine.Engine.save }}\n\n<!-- doc-test-command: none -->\n",
    "part/shows": "![A plot](../images/plot.svg)\n[Imports](../imports.md)\n\n<!-- doc-test-command: none -->\n",
    "plain": "```python\nx = 1\n```\n\n<!-- doc-test-command: python plain.py -->\n",
}


class Project:
    """A repository with a library, pages and one commit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q", "-b", "main")
        for name, text in FILES.items():
            self.write(name, text)
        for name, text in PAGES.items():
            for language in ("en", "zh-Hans"):
                self.write(f"docs/source/{language}/{name}.md", text)
        self.commit()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def git(self, *words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *words], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x", "--allow-empty")
        return self.git("rev-parse", "HEAD")

    def main(self, *words: str) -> int:
        return cli.main(list(words), self.root)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)


def listed(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("    "):
            found[list(found)[-1]].append(line.strip())
        else:
            found[line.split()[0]] = []
    return found


CHANGES = {
    "a module, through another": (
        ["src/lib/base.py"],
        {"imports": ["imports src/lib/base.py"], "part/hooks": ["documents src/lib/base.py"]},
    ),
    "a module that is documented": (
        ["src/lib/engine.py"],
        {"imports": ["imports src/lib/engine.py"], "part/hooks": ["documents src/lib/engine.py"]},
    ),
    "an original": (["docs/source/en/plain.md"], {"plain": ["is written in docs/source/en/plain.md"]}),
    "a translation": (["docs/source/zh-Hans/plain.md"], {"plain": ["is written in docs/source/zh-Hans/plain.md"]}),
    "a page that is linked": (["docs/source/en/imports.md"], {"imports": ["is written in docs/source/en/imports.md"]}),
    "an image": (["docs/source/en/images/plot.svg"], {"part/shows": ["shows docs/source/en/images/plot.svg"]}),
    "the harness": (["doctest/pagetest/cli.py"], {name: ["is run with doctest/pagetest/cli.py"] for name in PAGES}),
    "the front door": (["docs_test.py"], {name: ["is run with docs_test.py"] for name in PAGES}),
    "the tested versions": (["constraints.txt"], {name: ["is run with constraints.txt"] for name in PAGES}),
    "two things": (
        ["src/lib/base.py", "docs/source/en/imports.md"],
        {
            "imports": ["is written in docs/source/en/imports.md", "imports src/lib/base.py"],
            "part/hooks": ["documents src/lib/base.py"],
        },
    ),
}


@pytest.mark.parametrize(("files", "pages"), CHANGES.values(), ids=CHANGES)
def test_a_change_affects(project, capsys, files, pages) -> None:
    for name in files:
        with (project.root / name).open("a") as file:
            file.write("\n")
    assert project.main("--affected", "--list") == 0
    assert listed(capsys.readouterr().out) == pages


@pytest.mark.parametrize("names", [[], ["README.md"], ["src/lib/other.py"], ["build/docs/pages/en/plain/plain.py"]])
def test_nothing_is_affected(project, capsys, names) -> None:
    for name in names:
        project.write(name, "other\n")
    for words in (["--affected"], ["--affected", "--list"], ["--affected", "--check"]):
        assert project.main(*words) == 0
        assert capsys.readouterr().out == "no page is affected by what differs from HEAD\n"


def test_new_deleted_staged_and_renamed_files_count(project, capsys) -> None:
    project.write("docs/source/en/fresh.md", PAGES["plain"].replace("plain", "fresh"))
    (project.root / "src/lib/base.py").unlink()
    project.git("mv", "docs/source/en/images/plot.svg", "docs/source/en/images/figure.svg")
    project.main("--affected", "--list")
    assert listed(capsys.readouterr().out) == {
        "fresh": ["is written in docs/source/en/fresh.md"],
        "imports": ["imports src/lib/base.py"],
        "part/hooks": ["documents src/lib/base.py"],
        "part/shows": ["shows docs/source/en/images/plot.svg"],
    }


def test_a_revision_and_the_point_where_a_branch_left(project, capsys) -> None:
    first = project.git("rev-parse", "HEAD")
    project.git("checkout", "-q", "-b", "topic")
    project.write("docs/source/en/plain.md", PAGES["plain"] + "\nMore.\n")
    project.commit()
    project.git("checkout", "-q", "main")
    project.write("src/lib/base.py", "class Base: ...\n")
    project.commit()
    project.git("checkout", "-q", "topic")
    assert project.main("--affected", "--list") == 0
    assert "no page is affected" in capsys.readouterr().out
    for revision, pages in {first: ["plain"], "main": ["imports", "part/hooks", "plain"], "main...": ["plain"]}.items():
        assert project.main("--affected", revision, "--list") == 0
        assert list(listed(capsys.readouterr().out)) == pages, revision


def test_affected_pages_are_run(project, capfd) -> None:
    project.write("docs/source/en/plain.md", PAGES["plain"] + "\nMore.\n")
    assert project.main("--affected") == 0
    assert [line.split()[:3] for line in capfd.readouterr().out.splitlines()] == [
        ["en", "plain", "PASS"],
        ["zh-Hans", "plain", "SAME"],
        ["2", "passed,", "0"],
    ]


def test_many_reasons_are_counted(project, capsys) -> None:
    for number in range(9):
        project.write(f"doctest/pagetest/part_{number}.py", "")
    project.main("--affected", "--list")
    assert listed(capsys.readouterr().out)["plain"][-1] == "and 6 more"


@pytest.mark.parametrize("revision", ["nowhere", "plain", "-x", "nowhere..."])
def test_an_unknown_revision_is_a_usage_error(project, capsys, revision) -> None:
    assert project.main(f"--affected={revision}") == 2
    assert f"git knows no revision `{revision.removesuffix('...')}`" in capsys.readouterr().err


def test_a_folder_that_is_no_repository_is_a_usage_error(docs, capsys, monkeypatch, tmp_path) -> None:
    docs.add("lesson", "x = 1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert cli.main(docs.arguments("--affected"), tmp_path) == 2
    assert "and git says: fatal: not a git repository" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert cli.main(docs.arguments("--affected"), tmp_path) == 2
    assert "git cannot be run: No such file" in capsys.readouterr().err
