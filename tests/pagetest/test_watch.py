"""The watch: pages run again when they, or what they import, are saved; nothing stale is ever shown."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pagetest.limits import scaled
from pagetest.warm.fork_server import ForkServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path
from pagetest import cli
sys.exit(cli.main(sys.argv[2:], Path(sys.argv[1])))
"""
PATIENCE_SECONDS = scaled(300)


class Watcher:
    """A watch over a project in a temporary folder."""

    def __init__(self, root: Path, *words: str) -> None:
        path = os.pathsep.join([str(ROOT / "doctest"), str(root / "src")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(root), "--watch", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))

    def until(self, pattern: str) -> list[str]:
        """All lines up to the first one that holds the pattern."""
        seen: list[str] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (seen and re.search(pattern, seen[-1])):
            try:
                seen.append(self.lines.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                pytest.fail(f"no line with {pattern!r} after {seen}")
        return seen

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            self.thread.join()
            assert self.process.stdout
            self.process.stdout.close()


class Project:
    """A library and pages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.watchers: list[Watcher] = []
        self.write("src/lib/__init__.py", "")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)  # as careful editors do

    def page(self, code: str, name: str = "lesson", command: str = "", languages: tuple[str, ...] = ("en",)) -> None:
        command = command or f"python {name}.py"
        text = f"# Title\n\nText.\n```python\n{code}\n```\n\n<!-- doc-test-command: {command} -->\n"
        for language in languages:
            self.write(f"docs/source/{language}/{name}.md", text)

    def watch(self, *words: str) -> Watcher:
        self.watchers.append(Watcher(self.root, *words))
        return self.watchers[-1]


@pytest.fixture
def project(tmp_path) -> Iterator[Project]:
    made = Project(tmp_path)
    yield made
    for watcher in made.watchers:
        if watcher.process.poll() is None:
            watcher.end(signal.SIGKILL)


def assert_warm(lines: list[str]) -> None:
    """How fast that is belongs to benchmarks/watch_latency.py."""
    assert re.search(r"\[warm, \d+\.\d s\]", "\n".join(lines)), lines


def test_a_saved_page_is_run_again_by_a_fork(project) -> None:
    project.page("x = 1\nprint(x)")
    watcher = project.watch("lesson", "--lang", "en")
    assert re.search(r"PASS .*\[cold, \d+\.\d s\]", "\n".join(watcher.until("Ctrl-C ends")))

    project.page("x = 1\nprint(x)\nraise ValueError('boom')")
    failed = "\n".join(watcher.until("log: "))
    assert "docs/source/en/lesson.md was saved" in failed
    assert "FAIL  cpu x1" in failed
    assert "lesson.md:7: ValueError: boom" in failed
    assert "  >    7 | raise ValueError('boom')" in failed
    assert_warm([failed])

    project.page("x = (")
    assert "SyntaxError" in "\n".join(watcher.until("lesson.md:5: "))

    project.page("x = 2\nassert __name__ == '__main__'")
    assert_warm(watcher.until(r"PASS .* lines 2/2 "))


def test_a_saved_library_is_seen(project) -> None:
    project.write("src/lib/inner.py", "VALUE = 1\n")
    project.write("src/lib/outer.py", "from lib.inner import VALUE\n")
    project.write("src/lib/stranger.py", "")
    project.page("import json\nfrom lib.outer import VALUE\nassert VALUE == 1, VALUE")
    watcher = project.watch("lesson", "--lang", "en")
    watcher.until("Ctrl-C ends")
    project.write("src/lib/stranger.py", "x = 1\n")
    project.write("src/lib/inner.py", "VALUE = 23\n")
    lines = watcher.until("log: ")
    assert "AssertionError: 23" in "\n".join(lines)
    assert sum("stranger.py was saved" in line and "inner.py" not in line for line in lines) == 0
    (project.root / "src/lib/inner.py").unlink()
    assert "No module named 'lib.inner'" in "\n".join(watcher.until("log: "))
    project.write("src/lib/inner.py", "VALUE = 1\n")
    assert_warm(watcher.until("PASS"))


def test_a_page_that_lost_an_import_is_not_run_where_it_is_loaded(project) -> None:
    """`xml.dom` is only an attribute of `xml` if someone imported `xml.dom`."""
    project.page("import xml\nimport xml.dom\nassert xml.dom.__name__")
    watcher = project.watch("lesson", "--lang", "en")
    watcher.until("Ctrl-C ends")
    project.page("import xml\nimport xml.dom\nassert xml.dom.__name__\nx = 1")
    assert_warm(watcher.until("PASS"))
    project.page("import xml\nassert xml.dom.__name__\nx = 1")
    lines = "\n".join(watcher.until("log: "))
    assert "AttributeError: module 'xml' has no attribute 'dom'" in lines
    assert "cold" in lines


def test_a_translation_is_watched_too(project) -> None:
    project.page("x = 1", languages=("en", "zh-Hans"))
    watcher = project.watch("lesson")
    assert "SAME" in watcher.until("zh-Hans")[-1]
    watcher.until("Ctrl-C ends")
    project.page("x = 2", languages=("zh-Hans",))
    assert "zh-Hans/lesson.md was saved" in watcher.until("was saved")[-1]
    assert "FAIL" in watcher.until("zh-Hans .*lesson")[-1]


def test_only_the_pages_that_are_affected_are_run(project) -> None:
    project.page("x = 1", "one")
    project.page("x = 1", "two")
    project.page("x = 1", "three")
    watcher = project.watch("one", "two", "--lang", "en")
    watcher.until("Ctrl-C ends")
    project.page("x = 3", "three")
    project.page("x = 2", "two")
    lines = watcher.until("PASS")
    assert not any("one" in line for line in lines), lines
    assert "two" in lines[-1]


def test_two_ranks_of_torch_are_run_by_forks(project) -> None:
    code = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
    code += "dist.destroy_process_group()\n"
    command = "torchrun --standalone --nproc_per_node=2 lesson.py"
    project.page(code, command=command)
    watcher = project.watch("lesson", "--lang", "en")
    watcher.until("Ctrl-C ends")
    for number in range(2):
        project.page(f"{code}x = {number}", command=command)
        assert_warm(watcher.until("PASS  cpu gloo x2 .* lines 5/5 "))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_no_process_behind(project, number) -> None:
    project.page("x = 1")
    watcher = project.watch("lesson", "--lang", "en")
    watcher.until("Ctrl-C ends")
    project.page("import time\nprint('here', flush=True)\ntime.sleep(1000)")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(family := watcher.family()) != 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(family) == 3, "the warm parent, the page, and what stands between it and the harness"
    assert watcher.end(number) == 130
    assert "interrupted" in watcher.until("interrupted")[-1]
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
    assert not any(process.status() != psutil.STATUS_ZOMBIE for process in alive)


def test_a_killed_harness_takes_its_parents_along(project) -> None:
    project.page("x = 1")
    watcher = project.watch("lesson", "--lang", "en")
    watcher.until("Ctrl-C ends")
    project.page("x = 2")
    watcher.until("warm")
    (parent,) = watcher.family()
    watcher.end(signal.SIGKILL)
    parent.wait(PATIENCE_SECONDS)


def test_a_parent_in_which_a_thread_runs_does_not_fork(tmp_path) -> None:
    (tmp_path / "plain.py").touch()
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
    )
    environment = {**os.environ, "COLOSSAL_PAGE_SCRIPT": "lesson.py", "PYTHONPATH": str(tmp_path)}
    for module, fit in (("plain", True), ("threaded", False), ("os.path", True), ("no_such_module", True)):
        parent = ForkServer(environment, tmp_path, [module])
        try:
            assert parent.can_fork is fit, module
        finally:
            parent.close()


def test_a_parent_that_died_is_not_asked(tmp_path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos.abort()\n")
    environment = {**os.environ, "COLOSSAL_PAGE_SCRIPT": "lesson.py", "PYTHONPATH": str(tmp_path)}
    parent = ForkServer(environment, tmp_path, ["deadly"])
    assert not parent.can_fork
    assert parent.fork({}) == 0
    parent.close()


def test_what_cannot_be_forked_is_started_cold(project) -> None:
    project.page("x = 1", command="python -W ignore lesson.py")
    watcher = project.watch("lesson", "--lang", "en")
    watcher.until("Ctrl-C ends")
    project.page("x = 2", command="python -W ignore lesson.py")
    assert "[cold, " in watcher.until("PASS")[-1]
