import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from colossal._src import _native as native
from colossal._src.testing.limits import scaled
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
    monkeypatch.setattr(native, "_prebuilt_folder", lambda: tmp_path / "prebuilt")
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


def test_a_changed_header_of_two_folders_is_another_library_of_each(sources: Path, tmp_path: Path) -> None:
    for number, folder in ((2, "cpu"), (3, "other")):
        (sources / folder).mkdir()
        text = f'#include "../answer.h"\nextern "C" int answer() {{ return {number} * ANSWER; }}\n'
        (sources / folder / f"{folder}.cpp").write_text(text)
    for value in (7, 8):
        (sources / "answer.h").write_text(f"#define ANSWER {value}\n")
        native._attempt.cache_clear()
        assert native.library("cpu/cpu").answer() == 2 * value
        assert native.library("other/other").answer() == 3 * value
    assert len(built(tmp_path)) == 4


def test_the_shared_header_of_adam_is_part_of_both_libraries(tmp_path: Path, monkeypatch) -> None:
    copy = Path(shutil.copytree(native._sources(), tmp_path / "csrc"))
    monkeypatch.setattr(native, "_sources", lambda: copy)
    files = [native._file_of("cpu/adam"), native._file_of("cuda/adam")]
    before = [native._key(file) for file in files]
    with (copy / "adam.h").open("a") as header:
        header.write("// another\n")
    assert all(native._key(file) != key for file, key in zip(files, before, strict=True))


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
    with pytest.raises(UnsupportedError, match="no other user can write to"):
        native.library("answer")
    assert not list(elsewhere.iterdir())


PROGRAM = """
import sys
from pathlib import Path
from colossal._src import _native as native
native._sources = lambda: Path(sys.argv[1])
native._QUIET_SECONDS = float(sys.argv[2])
assert native.library("answer").answer() == 42
"""


def test_processes_that_start_together_build_one_library(sources: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(sources), "100"]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    assert [(p.communicate()[1], p.returncode) for p in started] == [("", 0)] * 4
    assert len(built(tmp_path)) == 1


def slow_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that says in a file that it has begun, and goes on once another file is there."""
    began, go_on, script = tmp_path / "began", tmp_path / "go on", tmp_path / "compiler"
    waiting = f'until [ -e "{go_on}" ]; do sleep 0.01; done'
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ echo $$ > "{began}"; {waiting}; }}\nexec c++ "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    return began


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + scaled(600)
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_build_does_not_block_the_next(sources: Path, tmp_path: Path, monkeypatch) -> None:
    began = slow_compiler(tmp_path, monkeypatch)
    command = [sys.executable, "-c", PROGRAM, str(sources), "100"]
    killed = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for(began)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    os.killpg(int(began.read_text()), signal.SIGKILL)  # the compiler, which nobody killed
    (left,) = built(tmp_path)
    assert left.name.startswith("tmp")
    (tmp_path / "go on").touch()
    assert native.library("answer").answer() == 42
    (library,) = built(tmp_path)
    assert library.name.startswith("answer-")


def test_a_build_that_takes_longer_than_a_moment_is_told(sources: Path, tmp_path: Path, monkeypatch) -> None:
    began = slow_compiler(tmp_path, monkeypatch)
    command = [sys.executable, "-c", PROGRAM, str(sources), "0.01"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    line = process.stderr.readline()  # before the compiler may go on
    wait_for(began)
    (tmp_path / "go on").touch()
    assert (line, *process.communicate()[1].splitlines()) == (
        "colossal: building csrc/answer.cpp once for this machine\n",
    )
    assert process.returncode == 0


def test_a_build_that_is_interrupted_stops_the_compiler(sources: Path, tmp_path: Path, monkeypatch) -> None:
    assert sources.is_dir()
    began = slow_compiler(tmp_path, monkeypatch)

    def interrupt(_: str) -> None:
        wait_for(began)
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(native.sys.stderr, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        native.library("answer")
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)
    assert not built(tmp_path)


def prebuilt(sources: Path, tmp_path: Path) -> Path:
    """A package with what it needs of all sources, which lie in a folder as they do in the repository."""
    (sources / "cpu").mkdir()
    (sources / "answer.cpp").rename(sources / "cpu" / "answer.cpp")
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    (library,) = native.prebuild(folder)
    return library


def test_a_library_of_the_package_is_taken_without_a_compiler(sources: Path, tmp_path: Path, monkeypatch) -> None:
    library = prebuilt(sources, tmp_path)
    assert library.name.startswith("cpu-answer-")
    assert stat.S_IMODE(library.stat().st_mode) == 0o755
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.library("cpu/answer").answer() == 42
    assert not built(tmp_path)


@pytest.mark.parametrize("what", ["source", "header", "shared header", "header above", "machine", "library"])
def test_a_library_of_the_package_that_does_not_fit_is_not_taken(
    sources: Path, tmp_path: Path, monkeypatch, what
) -> None:
    library = prebuilt(sources, tmp_path)
    if what == "source":
        (sources / "cpu" / "answer.cpp").write_text(ANSWER + "// another\n")
    elif what == "shared header":
        (sources / "cpu" / "part.h").write_text("// part\n")
    elif what == "header above":
        (sources / "part.h").write_text("// part\n")
    elif what == "header":
        (sources / "cpu" / "answer").mkdir()
        (sources / "cpu" / "answer" / "part.h").write_text("// part\n")
    elif what == "machine":
        monkeypatch.setattr(native.platform, "machine", lambda: "another")
    else:
        library.write_bytes(b"of another system")
    assert native.library("cpu/answer").answer() == 42
    assert len(built(tmp_path)) == 1


def test_building_for_a_package_without_a_compiler_is_refused(sources: Path, tmp_path: Path, monkeypatch) -> None:
    (sources / "cpu").mkdir()
    (sources / "answer.cpp").rename(sources / "cpu" / "answer.cpp")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match="needs a C\\+\\+ compiler. Found none: no-such-compiler"):
        native.prebuild(tmp_path)


def test_a_package_gets_cuda_where_its_compiler_is_found_or_named(sources: Path, tmp_path: Path, monkeypatch) -> None:
    prebuilt(sources, tmp_path)
    (sources / "cuda").mkdir()
    (sources / "cuda" / "answer.cu").write_text(ANSWER)
    cuda = native._LANGUAGES[".cu"]._replace(names=("no-such-nvcc",))
    monkeypatch.setitem(native._LANGUAGES, ".cu", cuda)
    monkeypatch.delenv("NVCC", raising=False)
    assert [library.name.split("-")[0] for library in native.prebuild(tmp_path)] == ["cpu"]
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    with pytest.raises(UnsupportedError, match="needs a CUDA compiler. Found none: no-such-nvcc.*install the CUDA"):
        native.prebuild(tmp_path)
    compiler = tmp_path / "nvcc"
    compiler.write_text('#!/bin/sh\necho "$@" > "$0.log"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("NVCC", str(compiler))
    assert [library.name.split("-")[0] for library in native.prebuild(tmp_path)] == ["cpu", "cuda"]
    assert "-arch=all-major" in compiler.with_suffix(".log").read_text()


def test_cuda_without_its_compiler_is_said_with_what_to_do(sources: Path, monkeypatch) -> None:
    (sources / "gpu.cu").write_text("")
    monkeypatch.setenv("NVCC", "no-such-compiler")
    with pytest.raises(UnsupportedError, match="needs a CUDA compiler.*install the CUDA toolkit, or let NVCC name"):
        native.library("gpu")


def test_cuda_is_compiled_for_the_device_at_hand(monkeypatch) -> None:
    language = native._LANGUAGES[".cu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert native._flags_of_device(language) == ["-arch=all-major"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert native._flags_of_device(language) == ["-arch=sm_90"]
    assert native._flags_of_device(native._LANGUAGES[".cpp"]) == []


def test_a_source_that_is_not_there_is_said(sources: Path) -> None:
    assert sources.is_dir()
    with pytest.raises(UnsupportedError, match="Found none for nothing in .*csrc"):
        native.library("nothing")


def test_own_sources_are_found() -> None:
    assert (native._sources() / "cpu" / "copy.cpp").is_file()
