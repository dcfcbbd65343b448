"""The shared memory engine under sanitizers: ranks are threads of one process, so all their races can be seen."""

import os
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
DRIVER = Path(__file__).parent / "driver"
EDITS: dict[str, list[dict[str, Any]]] = tomllib.loads((DRIVER / "edits.toml").read_text(encoding="utf-8"))
MUTANTS = {mutant["name"]: number for number, mutant in enumerate(EDITS["mutant"], 1)}

SEEDS = int(os.environ.get("COLOSSAL_STRESS_SEEDS", "2"))
"""Runs with buffers of the usual size; ten times as many have small ones. More find more."""

FLAGS = ("-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread")
BUILDS = {
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-fsanitize=thread"),
    "edited": ("-O1", "-fsanitize=thread"),
}
SMALL = {"slot": 4096, "direct": 512, "ring": 1024, "stream": 8192, "limit": 30000}
"""So little fits into these buffers that a few KB take many steps."""
SHORT_SLICE, NO_SLICE = 500_000, 3600 * 10**9
"""A waiter sleeps for so long (ns) unless it is woken up. Who forgets to wake one that sleeps on meets the watchdog."""
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1 report_thread_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}

USAGE = 64
"""The driver's exit status where it does not understand its arguments."""

Programs = dict[str, Path]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The driver, with the headers that are shipped and with an edited copy of them."""
    if not shutil.which("g++"):
        pytest.skip("needs a C++ compiler with sanitizers, and there is no g++ here")
    folder = tmp_path_factory.mktemp("sanitizers")
    _check_runtimes(folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    for edit in (*EDITS["size"], *EDITS["delay"]):
        _edit(folder, edit)
    for mutant in EDITS["mutant"]:
        _edit(folder, {**mutant, "new": mutant["new"].replace("NUMBER", str(MUTANTS[mutant["name"]]))})

    def build(name: str) -> Path:
        headers = folder if name == "edited" else ROOT
        _compile((*FLAGS, *BUILDS[name], "-I", str(headers / "csrc")), DRIVER / "stress.cpp", folder / name)
        return folder / name

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(BUILDS, pool.map(build, BUILDS), strict=True))


def _check_runtimes(folder: Path) -> None:
    source = folder / "nothing.cpp"
    source.write_text("int main() { return 0; }\n")
    for name in ("thread", "address"):
        try:
            _compile(BUILDS[name], source, folder / "nothing")
        except AssertionError as error:
            pytest.skip(f"needs the sanitizers of g++, and {BUILDS[name][1]} does not link here: {error}")


def _compile(flags: Sequence[str], source: Path, target: Path) -> None:
    command = ["g++", *flags, "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def _edit(folder: Path, edit: dict[str, Any]) -> None:
    file = folder / "csrc" / "cpu" / "shm" / edit["file"]
    text = file.read_text(encoding="utf-8")
    assert text.count(edit["old"]) == 1, f"edits.toml looks for this in {edit['file']}, once:\n{edit['old']}"
    file.write_text(text.replace(edit["old"], edit["new"]), encoding="utf-8")


def _run(program: Path, **settings: int) -> tuple[int, str]:
    command = [str(program), *(f"{name}={value}" for name, value in settings.items())]
    environment = {**os.environ, **OPTIONS}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    loader = shutil.which("setarch")
    if "unexpected memory mapping" in done.stderr and loader:  # some kernels put memory where the sanitizer has its own
        command = [loader, platform.machine(), "-R", *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout + done.stderr


def _all_clean(*runs: tuple[Path, dict[str, int]]) -> None:
    def check(run: tuple[Path, dict[str, int]]) -> None:
        program, settings = run
        code, output = _run(program, **settings)
        assert (code, output) == (0, "done\n"), f"{program.name} {settings} ends with {code}:\n{output}"

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, runs))


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_what_is_shipped(programs: Programs, sanitizer: str) -> None:
    """Results are right, faults are told to all, and no sanitizer reports anything."""
    program = programs[sanitizer]
    usual = [(program, {"ranks": ranks, "seeds": SEEDS}) for ranks in (2, 3, 4)]
    _all_clean((program, {"ranks": 3, "seed": 100, "seeds": (SEEDS + 1) // 2, "large": 6 << 20, "faults": 0}), *usual)


def test_small_buffers(programs: Programs) -> None:
    """Many steps, each of which is late now and then."""
    settings = {"seeds": 10 * SEEDS, "slice": SHORT_SLICE, **SMALL}
    _all_clean(*((programs["edited"], {"ranks": ranks, **settings}) for ranks in (2, 3, 4, 5)))


def test_whoever_waits_is_woken_up(programs: Programs) -> None:
    """Nobody has to look again after a while, as long as nothing fails."""
    settings = {"seeds": 10 * SEEDS, "faults": 0, "slice": NO_SLICE, **SMALL}
    _all_clean(*((programs["edited"], {"ranks": ranks, "seed": 500, **settings}) for ranks in (2, 3, 4)))


def test_mistakes_are_found(programs: Programs) -> None:
    """A rule of the engine that is broken on purpose ends the program."""

    def find(mutant: dict[str, Any]) -> None:
        settings = {"ranks": 3, "seeds": 10, "mutant": MUTANTS[mutant["name"]], **SMALL, **mutant["run"]}
        code, output = _run(programs["edited"], **settings)
        assert code not in {0, USAGE}, f"not found: {mutant['name']}\n{output}"
        assert mutant.get("found", "") in output, f"{mutant['name']}: not as expected\n{output}"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(find, EDITS["mutant"]))
