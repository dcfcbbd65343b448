"""api.json is made again when anything that it is made from has changed, and only then."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pagebuild.api import command, stamp
from pagebuild.api.library import Library
from pagebuild.api.stamp import Stamp, inputs_of
from pagetest.model.reader import parse_page

pytestmark = pytest.mark.slow

SOURCE = '"""A library."""\n\n__all__ = ["VERSION"]\nVERSION = 1\n"""Which one."""\n'
PAGE = "# T\n\n{{ autodoc:tinylib.VERSION }}\n\n<!-- doc-test-command: none -->\n"


@pytest.fixture
def library(make_library) -> Library:
    return make_library({"__init__.py": SOURCE, "inner/_part.py": "x = 1\n"})


@pytest.fixture
def inputs(library, tmp_path) -> Callable[..., str]:
    """The digest as things are now."""
    program = tmp_path / "program"
    program.mkdir()
    (program / "reader.py").write_text("x = 1\n")

    def inputs(page: str = PAGE) -> str:
        fresh = Library(library.root, library.folder)
        return inputs_of(fresh, [parse_page(page, tmp_path / "page.md")], program)

    return inputs


@pytest.fixture
def run(library, tmp_path, monkeypatch, capsys) -> Callable[[], tuple[int, str, bool]]:
    """Runs the subcommand on the library; returns the status, what it says, and whether the reference was made."""
    page = tmp_path / "source" / "en" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE, encoding="utf-8")
    made = []
    real = command.build_reference
    monkeypatch.setattr(command, "library_of", lambda _: Library(library.root, library.folder))
    monkeypatch.setattr(command, "build_reference", lambda *arguments: made.append(1) or real(*arguments))

    def run() -> tuple[int, str, bool]:
        made.clear()
        parser = command.argparse.ArgumentParser()
        command.configure(parser, tmp_path)
        status = command.run(parser.parse_args(["--source", str(page.parents[1])]), tmp_path)
        return status, capsys.readouterr().out, bool(made)

    return run


def change(path: Path, text: str) -> None:
    """Changes a file and keeps its date, which must not matter."""
    before = path.stat()
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_digest_is_the_same_for_the_same(inputs) -> None:
    assert inputs() == inputs()
    assert inputs() == inputs(PAGE.replace("# T", "# Another title\n\nAnd words."))


@pytest.mark.parametrize("name", ["src/tinylib/__init__.py", "src/tinylib/inner/_part.py", "program/reader.py"])
@pytest.mark.parametrize("manner", ["changed", "removed", "joined"])
def test_every_source_counts(inputs, tmp_path, name, manner) -> None:
    before, path = inputs(), tmp_path / name
    if manner == "changed":
        change(path, path.read_text().replace("1", "2"))
    elif manner == "removed":
        path.unlink()
    else:
        path.with_name("another.py").write_text("")
    assert inputs() != before


def test_hooks_and_versions_count(inputs, monkeypatch) -> None:
    before = inputs()
    assert inputs(PAGE.replace("VERSION", "OTHER")) != before
    monkeypatch.setattr(stamp, "version", lambda _: "9.9")
    assert inputs() != before


def test_a_file_of_other_content_is_not_the_one_that_was_stamped(tmp_path) -> None:
    file = tmp_path / "api.json"
    assert not Stamp(file, "a").is_valid
    file.write_text("{}")
    assert not Stamp(file, "a").is_valid
    Stamp(file, "a").write()
    assert Stamp(file, "a").is_valid
    assert not Stamp(file, "b").is_valid
    file.write_text("{ }")
    assert not Stamp(file, "a").is_valid
    file.unlink()
    assert not Stamp(file, "a").is_valid
    Stamp(file, "a").remove()
    assert not list(tmp_path.iterdir())


def test_the_command_makes_it_once_and_again_after_a_change(run, library, tmp_path) -> None:
    status, said, is_made = run()
    assert (status, is_made) == (0, True), said
    assert said.endswith("; 0 findings\n")
    status, said, is_made = run()
    assert (status, is_made) == (0, False)
    assert said == f"{tmp_path}/build/docs/api.json: kept, for all that it was made from is the same; 0 findings\n"
    change(library.folder / "__init__.py", SOURCE.replace("Which one.", "Which two."))
    status, _, is_made = run()
    assert (status, is_made) == (0, True)


def test_what_has_findings_is_judged_every_time(run, library) -> None:
    assert run()[0] == 0
    change(library.folder / "__init__.py", SOURCE.replace('"""Which one."""\n', ""))
    for _ in range(2):
        status, said, is_made = run()
        assert (status, is_made) == (1, True)
        assert "says nothing" in said
    change(library.folder / "__init__.py", SOURCE)
    assert run()[::2] == (0, True)
