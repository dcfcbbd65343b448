import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from colossal import _native as native
from colossal.errors import UnsupportedError

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler, and there is none here")

ANSWER = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sources, and an empty cache."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cpp").write_text(ANSWER)
    monkeypatch.setattr(native, "_sources", lambda: folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    native._attempt.cache_clear()
    yield folder
    native._attempt.cache_clear()


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "colossal" / "native").glob("*.so"))


def test_builds_once_and_loads(sources: Path, tmp_path: Path, monkeypatch) -> None:
    assert sources.is_dir()
    assert native.library("answer").answer() == 42
    (library,) = built(tmp_path)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    native._attempt.cache_clear()
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("it was built again"))
    assert native.library("answer").answer() == 42


def test_a_changed_source_is_another_library(sources: Path, tmp_path: Path) -> None:
    assert native.library("answer").answer() == 42
    (sources / "answer.cpp").write_text(ANSWER.replace("42", "43"))
    native._attempt.cache_clear()
    assert native.library("answer").answer() == 43
    assert len(built(tmp_path)) == 2


def test_no_compiler_is_said_with_what_to_do(sources: Path, monkeypatch) -> None:
    assert sources.is_dir()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match=r"no-such-compiler.*only slower; install g\+\+"):
        native.library("answer")


def test_a_failed_build_is_said_once_and_leaves_nothing(sources: Path, tmp_path: Path, monkeypatch) -> None:
    (sources / "answer.cpp").write_text("this is not C++\n")
    with pytest.raises(UnsupportedError, match=r"refuses answer\.cpp: .*error"):
        native.library("answer")
    monkeypatch.setattr(native, "_built", lambda _: pytest.fail("it was tried again"))
    with pytest.raises(UnsupportedError):
        native.library("answer")
    assert not built(tmp_path)


def test_a_compiler_that_hangs_is_given_up(sources: Path, tmp_path: Path, monkeypatch) -> None:
    assert sources.is_dir()
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 60\n')
    slow.chmod(0o700)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(native, "_BUILD_SECONDS", 0.2)
    with pytest.raises(UnsupportedError, match="had not finished"):
        native.library("answer")
    assert not built(tmp_path)


def test_loads_nothing_from_a_folder_that_others_can_write_to(sources: Path, tmp_path: Path) -> None:
    assert sources.is_dir()
    shared = tmp_path / "cache" / "colossal" / "native"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    assert native.library("answer").answer() == 42
    assert not built(tmp_path)
    assert list((tmp_path / "temporary" / f"colossal-native-{os.getuid()}").glob("*.so"))


def test_a_user_without_a_home_builds_elsewhere(sources: Path, tmp_path: Path, monkeypatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    assert sources.is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(native.Path, "home", no_home)
    assert native.library("answer").answer() == 42
    assert list((tmp_path / "temporary").rglob("*.so"))


def test_does_not_follow_a_link_that_stands_for_the_folder(sources: Path, tmp_path: Path) -> None:
    assert sources.is_dir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "cache" / "colossal").mkdir(parents=True)
    (tmp_path / "cache" / "colossal" / "native").symlink_to(elsewhere)
    (tmp_path / "temporary").write_text("not a folder")
    with pytest.raises(UnsupportedError, match="nobody else can write to"):
        native.library("answer")
    assert not list(elsewhere.iterdir())


PROGRAM = """
import sys
from pathlib import Path
from colossal import _native as native
native._sources = lambda: Path(sys.argv[1])
assert native.library("answer").answer() == 42
"""


def test_processes_that_start_together_build_one_library(sources: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(sources)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    assert [(p.communicate()[1], p.returncode) for p in started] == [("", 0)] * 4
    assert len(built(tmp_path)) == 1


def test_own_sources_are_found() -> None:
    assert (native._sources() / "cpu" / "copy.cpp").is_file()
