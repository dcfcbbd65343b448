# pyright: reportArgumentType=false, reportOperatorIssue=false
"""`colossal check` as a user runs it, on this machine and on broken ones."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import colossal
from colossal._src import _native as native
from colossal._src.cli.check import communication, compatibility, devices, kernels, machine, versions
from colossal._src.cli.check.command import command
from colossal._src.cli.check.kernels import Kernel
from colossal._src.cli.check.rank import STEPS
from colossal._src.cli.check.report import Report, Row, Section, show, verdict
from colossal._src.cli.check.versions import Package
from colossal.cluster import AxisCost, Link, LinkCost

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SOURCE = Path(colossal.__file__).parents[1]
KEYS = {"section", "name", "status", "found", "value", "advice"}


def check(*words: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """``colossal check <words>`` in a fresh interpreter that finds modules in ``path`` first."""
    folders = [str(folder) for folder in (path, SOURCE) if folder]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | variables
    program = [sys.executable, "-m", "colossal.cli", "check", *words]
    return subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=500)


def rows_of(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, object]]:
    report = json.loads(done.stdout)
    assert set(report) == {"version", "usable", "rows"}
    assert report["version"] == 1
    assert all(set(row) == KEYS for row in report["rows"])
    assert report["usable"] == (done.returncode == 0) == all(row["status"] != "problem" for row in report["rows"])
    rows = {(row["section"], row["name"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"])
    return rows


def test_a_healthy_machine_is_usable() -> None:
    done = check("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done)
    for name in STEPS:
        assert rows["self test, 2 ranks, cpu", name]["status"] == "ok"
    assert rows["versions", "colossal"]["value"] == colossal.__version__
    assert rows["devices", "in use"]["value"] == "cpu"
    assert rows["communication", "gloo"]["value"] is True
    assert rows["kernels", "fused Adam"]["value"] is True
    assert rows["kernels", "one-pass Adam"]["value"] is bool(shutil.which("c++"))
    assert rows["machine", "memory"]["value"] > 0


def test_the_output_in_a_pipe_is_plain() -> None:
    done = check("--installation")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "This machine can train with colossal."
    assert "\x1b" not in done.stdout
    assert re.search(r"^compatibility\n  ✓ ok       torch and colossal +match: ", done.stdout, re.MULTILINE)
    assert not set(done.stdout) & set("│┃━─")


def test_a_torch_that_is_too_old_is_a_problem(tmp_path) -> None:
    folder = tmp_path / "torch-2.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n", encoding="utf-8")
    done = check("--json", path=tmp_path)
    assert done.returncode == 1
    rows = rows_of(done)
    assert rows["versions", "torch"]["status"] == "problem"
    assert rows["versions", "torch"]["found"] == "2.1.0, older than 2.11"
    assert "pip install 'torch>=2.11'" in rows["versions", "torch"]["advice"]
    assert rows["self test", "all"]["status"] == "skipped"


def test_a_torch_that_cannot_be_imported_is_a_problem(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open')", encoding="utf-8")
    done = check(path=tmp_path)
    assert done.returncode == 1
    assert "cannot be imported: libcudart.so.99: cannot open" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("This machine cannot train with colossal: ")


def test_an_interface_that_is_not_there_fails_in_the_backend_too() -> None:
    done = check("--json", GLOO_SOCKET_IFNAME="nosuch0", COLOSSAL_BACKEND="gloo")
    assert done.returncode == 1
    rows = rows_of(done)
    assert rows["communication", "host name"]["found"] == "GLOO_SOCKET_IFNAME names no interface: nosuch0"
    assert "Set it to one of" in rows["communication", "host name"]["advice"]
    assert rows["self test, 2 ranks, cpu", "launch"]["status"] == "problem"
    assert rows["self test, 2 ranks, cpu", "checkpoint"]["status"] == "skipped"


def test_a_self_test_that_does_not_end_in_time_is_a_problem() -> None:
    done = check("--json", "--timeout", "0.05")
    assert done.returncode == 1
    row = rows_of(done)["self test, 2 ranks, cpu", "launch"]
    assert row["status"] == "problem"
    assert "did not come to an end in 0.05 s" in row["found"]


def test_a_device_that_is_not_there_is_a_problem(monkeypatch) -> None:
    monkeypatch.setenv("COLOSSAL_DEVICE", "abacus")
    (row,) = [row for row in devices.SECTION.rows() if row.name == "in use"]
    assert row.status == "problem"
    assert row.found.startswith(
        "COLOSSAL_DEVICE=abacus: The device must be one that torch finds here: 'cpu'. Found 'abacus'"
    )


# ------------------------------------------------------------------------------------------ torch, CUDA, own code


def compatibility_rows() -> dict[str, Row]:
    return {row.name: row for row in compatibility.SECTION.rows()}


@pytest.fixture
def toolkit(tmp_path, monkeypatch) -> Path:
    """A CUDA toolkit, 12.8, whose compiler `NVCC` names."""
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("NVCC", str(compiler))
    return compiler


def test_every_documented_row_is_there(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    rows = compatibility_rows()
    assert (
        rows["torch and colossal"].found == f"match: {torch.__version__}, and {colossal.__version__}, which needs 2.11"
    )
    assert rows["CUDA of the system"].found == "none: no nvcc that runs"
    assert rows["CUDA of torch and system"].found == "no need to match: torch is a build for CPUs"
    assert rows["extensions in CUDA"].found == "not needed: torch is a build for CPUs"
    assert list(rows)[3] == "extensions in C++"


def test_a_torch_that_is_too_old_does_not_match(monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    row = compatibility_rows()["torch and colossal"]
    assert (row.status, row.value, row.advice) == ("problem", False, "Install torch 2.11 or newer.")
    assert row.found == f"differ: 2.9.1+cpu, and {colossal.__version__}, which needs 2.11"


@pytest.mark.parametrize(("needed", "status"), [("12.6", "ok"), ("13.0", "note")])
def test_cuda_of_torch_and_of_the_system_are_compared(needed, status, toolkit, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", needed)
    rows = compatibility_rows()
    assert rows["CUDA of the system"].found == f"12.8, {toolkit}"
    row = rows["CUDA of torch and system"]
    assert (row.status, row.value) == (status, status == "ok")
    assert row.found.endswith(f": {needed} and 12.8")
    assert rows["extensions in CUDA"].found == f"built at first use (JIT) by {toolkit}: adam"


def test_a_compiler_that_does_not_run_is_none(toolkit, monkeypatch) -> None:
    toolkit.write_text("#!/no/such/interpreter\n")
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    rows = compatibility_rows()
    assert rows["CUDA of the system"].value is None
    assert rows["CUDA of torch and system"].found == "torch brings its own 12.6; the system has none"


def test_own_code_is_built_at_install_or_at_first_use_or_not_at_all(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(native, "_prebuilt_folder", lambda: tmp_path)
    monkeypatch.setenv("CXX", sys.executable)
    row = compatibility_rows()["extensions in C++"]
    names = ", ".join(sorted(source.stem for source in (ROOT / "csrc" / "cpu").glob("*.cpp")))
    assert row.found == f"built at first use (JIT) by {sys.executable}: {names}"
    monkeypatch.setenv("CXX", "no-such-compiler")
    row = compatibility_rows()["extensions in C++"]
    assert (row.status, row.value) == ("note", None)
    assert "install g++, or a wheel that was built with CUDA_EXT=1" in str(row.advice)
    for source in (ROOT / "csrc" / "cpu").glob("*.cpp"):
        (tmp_path / native._prebuilt_name(source)).touch()
    row = compatibility_rows()["extensions in C++"]
    assert (row.status, row.found, row.value) == ("ok", f"built at install (AOT): {names}", "install")


@pytest.mark.parametrize("words", [("--timeout", "0"), ("--timeout", "soon"), ("--no-such-option",)])
def test_a_command_line_that_makes_no_sense_is_refused(words) -> None:
    assert CliRunner().invoke(command, list(words)).exit_code == 2


# ------------------------------------------------------------------------------------------ the sections


def test_the_packages_are_those_of_the_installation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={versions.PYTHON}"
    extras = project["optional-dependencies"]
    for package in versions.PACKAGES:
        names = extras[package.extra] if package.extra else project["dependencies"]
        assert f"{package.name}>={package.least}" in names
    looked_at = {package.name for package in versions.PACKAGES}
    asked_for = [*project["dependencies"], *extras["hf"], *extras["lora"], *extras["cli"]]
    assert {name.partition(">")[0] for name in asked_for} == looked_at


def test_the_tested_torch_is_the_one_of_the_constraints() -> None:
    assert f"torch=={versions.TESTED_TORCH}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("extra", "status"), [(None, "problem"), ("hf", "note")])
def test_a_missing_package_is_a_problem_only_if_it_is_needed(extra, status, monkeypatch) -> None:
    monkeypatch.setattr(versions, "PACKAGES", (Package("no-such-package", "1.0", extra, "tests"),))
    (row,) = [row for row in versions.SECTION.rows() if row.name == "no-such-package"]
    assert row.status == status
    assert row.found.startswith("not installed")
    advice = "pip install -e '.[hf]' in the clone" if extra else "pip install 'no-such-package>=1.0'"
    assert row.advice == f"For tests: {advice}"


def test_a_missing_package_makes_the_command_fail(monkeypatch) -> None:
    monkeypatch.setattr(versions, "PACKAGES", (Package("no-such-package", "1.0", None, "tests"),))
    done = CliRunner().invoke(command, ["--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["usable"] is False


@pytest.mark.parametrize(
    ("version", "least", "status"),
    [
        ("2.13.0+cpu", "2.11", "ok"),
        ("2.9.1", "2.11", "problem"),
        ("2.11.0a0+git1", "2.11", "ok"),
        ("3.0", "2.11", "ok"),
    ],
)
def test_versions_are_compared_by_their_numbers(version, least, status, monkeypatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda _: version)
    monkeypatch.setattr(versions, "PACKAGES", (Package("json", least, None, "tests"),))
    (row,) = [row for row in versions.SECTION.rows() if row.name == "json"]
    assert row.status == status


def test_a_torch_newer_than_the_tested_one_is_a_note(monkeypatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda _: "99.0.0")
    monkeypatch.setattr(versions, "PACKAGES", (versions.PACKAGES[0],))
    (row,) = [row for row in versions.SECTION.rows() if row.name == "torch"]
    assert row.status == "note"
    assert "newer than the tested" in row.found


def test_a_python_that_is_too_old_is_a_problem() -> None:
    assert versions._python("3.9.1", (3, 9)).status == "problem"
    assert versions._python("3.12.0", (3, 12)).status == "ok"


def test_a_backend_that_torch_lacks_is_a_problem_only_where_it_is_needed() -> None:
    assert communication._backend("nccl", "cuda", built=False, device="cuda").status == "problem"
    assert communication._backend("nccl", "cuda", built=False, device="cpu").status == "ok"
    assert communication._backend("gloo", "cpu", built=True, device="cpu").value is True


def test_a_torch_without_communication_is_a_problem(monkeypatch) -> None:
    from torch import distributed as dist

    monkeypatch.setattr(dist, "is_available", lambda: False)
    (row,) = communication.SECTION.rows()
    assert row.status == "problem"


def test_a_host_without_an_address_is_a_note(monkeypatch) -> None:
    def unknown(*_args: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(communication.socket, "getaddrinfo", unknown)
    row = communication._host_name()
    assert row.status == "note"
    assert "/etc/hosts" in row.advice


def test_a_file_of_link_costs_that_no_mesh_can_read_is_a_problem(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("COLOSSAL_LINK_COST", raising=False)
    assert communication._link_cost().status == "ok"
    path = tmp_path / "links.json"
    monkeypatch.setenv("COLOSSAL_LINK_COST", str(path))
    row = communication._link_cost()
    assert row.status == "problem"
    assert "links.json: No such file" in row.found
    LinkCost({"tp": AxisCost(4, Link(1e-5, 1e-9))}).save(path)
    assert (communication._link_cost().status, communication._link_cost().found) == ("ok", "tp 4, assumed")


def test_a_kernel_that_does_not_run_falls_back_and_says_why() -> None:
    def trial() -> str:
        raise RuntimeError("no such unit\nsecond line")

    row = Kernel("thing", "the slow way", trial).row()
    assert (row.status, row.found, row.value) == ("note", "falls back: the slow way", False)
    assert row.advice.endswith("no such unit")


def test_on_a_cpu_float8_falls_back_and_the_optimizers_do_not() -> None:
    rows = {row.name: row.value for row in kernels.SECTION.rows()}
    expected = {"fused Adam", "one-pass Adam", "foreach Adam"}
    expected |= {"streaming copy", "shared-memory collectives", "xxHash checksums"}
    assert rows == dict.fromkeys(expected, True) | {"float8 matrix product": False}


def test_without_a_compiler_one_row_says_that_adam_falls_back(tmp_path) -> None:
    done = check("--json", CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    rows = [row for (_, name), row in rows_of(done).items() if "Adam" in name and row["status"] == "note"]
    (row,) = rows
    assert (row["name"], row["value"]) == ("one-pass Adam", False)
    assert row["found"] == "falls back: torch's fused update, with passes before and after it"
    assert "no-such-compiler" in str(row["advice"])


def test_limits_that_are_low_are_notes(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (256, 4096))
    assert machine._open_files().status == "note"
    assert machine._open_files().value == 256
    small = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: small)
    assert machine._shared().status == machine._disk(tmp_path).status == "note"
    monkeypatch.setattr(machine, "_SHARED", tmp_path / "absent")
    assert machine._shared().found == "no /dev/shm that can be written to"


def test_the_memory_limit_of_a_container_is_told(monkeypatch, tmp_path) -> None:
    (tmp_path / "max").write_text("1073741824\n", encoding="ascii")
    monkeypatch.setattr(machine, "_CONTAINER_LIMITS", (tmp_path / "none", tmp_path / "max"))
    assert [row.value for row in machine._memory() if row.name == "memory limit"] == [2**30]


# ------------------------------------------------------------------------------------------ what is shown


def test_a_section_that_cannot_look_is_a_problem() -> None:
    def look() -> None:
        raise OSError("disk on fire")

    (row,) = Section("things", look).rows()
    assert (row.status, row.found) == ("problem", "OSError: disk on fire")


REPORT = Report(
    (
        Row("versions", "torch[cpu]", "ok", "2.13.0", "2.13.0"),
        Row("kernels", "thing", "note", "falls back", False, "Buy a faster machine."),
        Row("self test", "launch", "problem", "rank 1 [died]", None, "Try again."),
    )
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_every_row_and_every_advice_is_shown(stream, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    out = stream()
    monkeypatch.setattr(sys, "stdout", out)
    show(REPORT)
    shown = out.getvalue()
    for row in REPORT.rows:
        assert row.name in shown
        assert row.found in shown
        assert (row.advice or "") in shown
    assert verdict(REPORT) in shown
    assert ("\x1b[" in shown) == out.isatty()


@pytest.mark.parametrize(("encoding", "marks"), [("utf-8", "✓!✗"), ("ascii", "+!x")])
def test_marks_suit_the_encoding(encoding, marks, monkeypatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    show(REPORT)
    out.seek(0)
    assert [line[2] for line in out.read().splitlines() if line.startswith("  ")] == list(marks)


def test_the_verdict_counts_the_problems() -> None:
    assert verdict(REPORT) == "This machine cannot train with colossal: 1 problem."
    assert verdict(Report(REPORT.rows * 2)) == "This machine cannot train with colossal: 2 problems."
    assert verdict(Report(REPORT.rows[:2])) == "This machine can train with colossal."
