"""The pytest plugin: pages as tests, with and without xdist; and the slots that keep their ranks apart."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pagetest.limits import scaled
from pagetest.results.records import Records
from pagetest.slots import Slots, default_num_slots

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TWO_WORKERS, NO_WORKERS = ("-n", "2"), ("-p", "no:xdist")
INI = """
[pytest]
pythonpath = {}
addopts = --strict-markers --strict-config --import-mode=importlib -ra -p no:cacheprovider
filterwarnings = error
"""
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"
DIARY = "with open({!r}, 'a') as diary:\n    diary.write({!r} + '\\n')\n"


class Project:
    """A project whose pages import no torch, and whose pytest cannot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.diary = root / "diary"
        (root / "docs/source").mkdir(parents=True)
        (root / "src").mkdir()
        (root / "pytest.ini").write_text(INI.format(ROOT / "doctest"))
        (root / "conftest.py").write_text(NO_TORCH)
        shutil.copy(ROOT / "docs/conftest.py", root / "docs/conftest.py")

    def page(self, name: str, code: str, *languages: str, command: str = "") -> None:
        command = command or (f"python {Path(name).name}.py" if code else "none")
        block = f"```python\n{code}\n```\n" if code else ""
        for language in languages or ("en", "zh-Hans"):
            path = self.root / f"docs/source/{language}/{name}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# Title\n\nText.\n{block}\n<!-- doc-test-command: {command} -->\n", encoding="utf-8")

    def noted(self, name: str, wait_for: str = "") -> None:
        """A page that writes into the diary when it begins and, once another one has begun, when it ends."""
        note = DIARY.format(str(self.diary), name)
        self.page(name, f"{note}while {wait_for!r} not in open({str(self.diary)!r}).read(): pass\n{note}")

    def entries(self) -> list[str]:
        return self.diary.read_text().split()

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "pytest", "docs/source", *words]

    def pytest(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return subprocess.run(
            self.command(*words),
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            timeout=scaled(600),
            env=environment,
        )


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("workers", [TWO_WORKERS, NO_WORKERS])
def test_every_page_and_language_is_a_test(project, workers) -> None:
    project.page("basics/passes", "x = 1")
    project.page("prose", "")
    project.page("words", "print('result')", "en")
    project.page("words", "print('结果')", "zh-Hans")
    done = project.pytest(*workers, "-v")
    assert done.returncode == 0, done.stdout
    assert "3 passed, 2 skipped, 1 same" in done.stdout
    same = next(line for line in done.stdout.splitlines() if "SAME code identical to en" in line)
    assert "docs/source/zh-Hans/basics/passes.md::passes" in same
    assert re.search(r"PASSED cpu x1  \d+\.\d s  peak", done.stdout)
    assert "SKIPPED [1] docs/source/en/prose.md:1: no code" in done.stdout


def test_names_are_collected_and_chosen_as_usual(project) -> None:
    project.page("basics/one", "x = 1")
    project.page("two", "x = 1", "en")
    (project.root / "docs/source/en/_draft.md").write_text("# Draft\n")
    (project.root / "docs/source/notes.md").write_text("# Notes\n")
    done = project.pytest(*NO_WORKERS, "--collect-only", "-q")
    assert set(done.stdout.splitlines()[:4]) == {
        "docs/source/en/basics/one.md::one",
        "docs/source/en/two.md::two",
        "docs/source/en/two.md::two[zh-Hans]",
        "docs/source/zh-Hans/basics/one.md::one",
    }
    assert "1 passed, 3 deselected" in project.pytest(*NO_WORKERS, "-k", "en and one").stdout
    assert not (project.root / "build/docs/pages/zh-Hans").exists()


@pytest.mark.parametrize("workers", [TWO_WORKERS, NO_WORKERS])
def test_a_failure_shows_the_page_and_fails_its_translation(project, workers) -> None:
    project.page("fails", "x = 1\nraise ValueError('boom')")
    project.page("passes", "x = 1")
    project.page("alone", "x = 1", "en")
    done = project.pytest(*workers)
    assert done.returncode == 1
    assert "docs/source/en/fails.md:6: ValueError: boom" in done.stdout
    assert "  >    6 | raise ValueError('boom')" in done.stdout
    assert "code identical to en, which failed" in done.stdout
    assert "docs/source/zh-Hans/alone.md:1: every page exists in en and zh-Hans" in done.stdout
    assert "3 failed, 2 passed, 1 same" in done.stdout
    assert "pytest_plugin.py" not in done.stdout


def test_code_that_is_shared_is_run_once(project) -> None:
    for number in range(4):
        project.noted(f"page_{number}")
    done = project.pytest(*TWO_WORKERS)
    assert "4 passed, 4 same" in done.stdout
    assert sorted(project.entries()) == [f"page_{number}" for number in range(4) for _ in range(2)]


def test_long_pages_come_first(project) -> None:
    for name in ("a", "b", "c", "unknown"):
        project.noted(name)
    results = [
        {"page": page, "lang": "en", "device": "cpu", "status": "PASS", "seconds": seconds}
        for page, seconds in {"a": 3.0, "b": 20.0, "c": 7.0}.items()
    ]
    for record in results:
        Records(project.root / "build/docs/verified").write(record)
    assert "4 passed, 4 same" in project.pytest(*NO_WORKERS).stdout
    assert project.entries()[::2] == ["unknown", "b", "c", "a"]


@pytest.mark.parametrize(("slots", "apart"), [(1, True), (2, False)])
def test_pages_wait_for_slots(project, slots, apart) -> None:
    """xdist gives the first two pages to one worker and the other two to the other, whose first ones meet."""
    for name, other in {"a": "c", "b": "b", "c": "a", "d": "d"}.items():
        project.noted(name, "" if apart else other)
    assert "4 passed, 4 same" in project.pytest(*TWO_WORKERS, "--pages-slots", str(slots)).stdout
    names = project.entries()
    assert names[::2] == names[1::2] if apart else sorted(names) == ["a", "a", "b", "b", "c", "c", "d", "d"]


def test_results_are_entered(project) -> None:
    project.page("passes", "x = 1")
    project.page("fails", "raise ValueError")
    project.page("prose", "")
    project.pytest(*TWO_WORKERS)
    entries = Records(project.root / "build/docs/verified").read()
    assert [(entry["page"], entry["lang"], entry["status"]) for entry in entries] == [
        ("fails", "en", "FAIL"),
        ("passes", "en", "PASS"),
        ("fails", "zh-Hans", "FAIL"),
        ("passes", "zh-Hans", "SAME"),
    ]
    assert all(entry["fingerprint"] for entry in entries)


def test_the_limit_and_the_device_are_options(project) -> None:
    project.page("hangs", "import time\ntime.sleep(1000)", "en", "zh-Hans")
    done = project.pytest(*NO_WORKERS, "--pages-timeout", "3")
    assert "docs/source/en/hangs.md:" in done.stdout
    assert re.search(r"no end after \d+ s, killed", done.stdout)
    done = project.pytest("--pages-device", "cuda")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--pages-device cuda needs a GPU and a CUDA build of torch" in done.stderr


def test_an_interruption_ends_the_pages(project) -> None:
    project.page("sleeps", f"{DIARY.format(str(project.diary), 'here')}import time\ntime.sleep(1000)")
    # A shell starts what runs in its background with SIGINT ignored, and these tests may run there.
    command = ["env", "--default-signal=INT", *project.command(*TWO_WORKERS)]
    with subprocess.Popen(command, cwd=project.root, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + scaled(120)
        while not project.diary.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        pages = [
            child for child in psutil.Process(process.pid).children(recursive=True) if "sleeps.py" in child.cmdline()
        ]
        process.send_signal(signal.SIGINT)
        assert process.wait(scaled(120)) == pytest.ExitCode.INTERRUPTED
    assert len(pages) == 2  # the page and its supervisor
    for page in pages:
        page.wait(scaled(120))


def test_the_project_s_own_tests_know_nothing_of_pages() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/pagetest/test_tree.py", "--pages-slots=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --pages-slots=2" in done.stderr


# ------------------------------------------------------------------------------------------------------- the slots


HOLD = """
import sys, time
from pathlib import Path
from pagetest.slots import Slots

pool, count, ranks, seconds, log = sys.argv[1:]
slots, ranks = Slots(Path(pool), int(count)), int(ranks)
with slots.acquire(ranks):
    with open(log, "a") as file:
        file.write(f"{min(ranks, slots.num_slots)}\\n")
    time.sleep(float(seconds))
    with open(log, "a") as file:
        file.write(f"-{min(ranks, slots.num_slots)}\\n")
"""


def hold(slots: Slots, ranks: int, seconds: float, log: Path) -> subprocess.Popen[bytes]:
    """A process that takes slots for a while and writes down what it took and gave back."""
    words = [str(slots.folder), str(slots.num_slots), str(ranks), str(seconds), str(log)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "doctest")}
    return subprocess.Popen([sys.executable, "-c", HOLD, *words], env=environment)


def test_never_more_ranks_than_slots(tmp_path) -> None:
    """A count above the pool's takes all of it, and no two that need many wait for each other's half."""
    slots, log = Slots(tmp_path / "pool", 4), tmp_path / "log"
    processes = [hold(slots, ranks, 0.1, log) for ranks in (3, 3, 8, 1, 2, 4, 1)]
    assert [process.wait(scaled(120)) for process in processes] == [0] * 7
    used, most = 0, 0
    for line in log.read_text().splitlines():
        used += int(line)
        most = max(most, used)
    assert (used, most) == (0, 4)


def test_who_dies_gives_the_slots_back(tmp_path) -> None:
    slots, log = Slots(tmp_path / "pool", 2), tmp_path / "log"
    process = hold(slots, 2, 1000.0, log)
    deadline = time.monotonic() + scaled(120)
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    with slots.acquire(2):
        pass


def test_there_are_as_many_slots_as_cores_and_a_few_at_least() -> None:
    assert default_num_slots() == max(4, len(os.sched_getaffinity(0)))
