"""What ``CUDA_EXT=1 pip install .`` asks for, and what cannot be had."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
assert _SPEC
assert _SPEC.loader
hatch_build = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hatch_build)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"CUDA_EXT": "1"}, True),
        ({"CUDA_EXT": "0"}, False),
        ({"CUDA_EXT": ""}, False),
        ({"COLOSSAL_BUILD_EXT": "1"}, True),
        ({"COLOSSAL_BUILD_EXT": "0"}, False),
        ({"COLOSSAL_BUILD_EXT": "1", "CUDA_EXT": "1"}, True),
    ],
)
def test_both_names_ask_for_the_same(environment, wanted) -> None:
    assert hatch_build.is_wanted("standard", environment) is wanted


@pytest.mark.parametrize(
    ("version", "environment", "message"),
    [
        ("standard", {"CUDA_EXT": "yes"}, "are 0 or 1. Found CUDA_EXT=yes. Set one"),
        ("standard", {"CUDA_EXT": "1", "COLOSSAL_BUILD_EXT": "0"}, "Found COLOSSAL_BUILD_EXT=0 and CUDA_EXT=1, which"),
        ("standard", {"CUDA_EXT": "0", "COLOSSAL_BUILD_EXT": "1"}, "Found COLOSSAL_BUILD_EXT=1 and CUDA_EXT=0, which"),
        ("editable", {"CUDA_EXT": "1"}, "Found CUDA_EXT=1 and an editable installation. Unset it"),
    ],
)
def test_what_contradicts_is_said(version, environment, message) -> None:
    with pytest.raises(ValueError, match=message):
        hatch_build.is_wanted(version, environment)


def build(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel as pip does, with the backend that is installed here."""
    program = f"import hatchling.build; hatchling.build.build_wheel({str(tmp_path)!r})"
    environment = {name: value for name, value in os.environ.items() if name not in hatch_build.VARIABLES}
    command = [sys.executable, "-c", program]
    environment |= variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler, and there is none here")
def test_the_wheel_holds_what_was_built(tmp_path) -> None:
    done = build(tmp_path, CUDA_EXT="1")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    names = [Path(name).name.split("-") for name in zipfile.ZipFile(wheel).namelist() if "_prebuilt/" in name]
    built = {(language, source) for language, source, *_ in names}
    assert built >= {("cpu", source.stem) for source in (ROOT / "csrc" / "cpu").glob("*.cpp")}
    if "cuda" not in {language for language, _ in built}:
        assert "CUDA needs nvcc: install the CUDA toolkit, or let NVCC name it" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("CXX", "needs a C++ compiler. Found none: no-such-compiler"),
        ("NVCC", "needs a CUDA compiler. Found none: no-such"),
    ],
)
def test_without_a_compiler_the_wheel_is_refused(variable, message, tmp_path) -> None:
    done = build(tmp_path, CUDA_EXT="1", **{variable: "no-such-compiler"})
    assert done.returncode == 1
    assert message in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_nothing_is_built_unasked(tmp_path) -> None:
    assert build(tmp_path, CXX="no-such-compiler").returncode == 0
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
