"""Plants mistakes, one at a time, in a copy of the project, and sees whether tests find them.

``python tests/mutants/run.py [NAME...] [--list] [--jobs N]``; a name is that of a mutant or the beginning of several.

The tables beside this file say what is planted, and which tests must find it. The checkout is never touched: its files
are copied, and only the tests of a mutant run. What was found is kept in ``build/mutants.json`` until the code or these
tests change, so that a session that was interrupted goes on where it was.
"""

import argparse
import hashlib
import json
import os
import platform
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "tests" / "mutants"
RESULTS = ROOT / "build" / "mutants.json"

REQUIRED = 0.97
"""Share of the mutants that tests must find."""

FLOOR_SECONDS, FACTOR = 30.0, 5.0
"""A mutant's tests may take this long, and as many times longer than without it."""

IMPORTED = ("torch", "torch._dynamo", "torch.distributed.tensor")
"""What all tests need, imported once."""

_SOURCES = ("src", "doctest", "csrc", "tests")
_FAILED = 1  # exit status of pytest
_PYTEST = ("-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=0")


class MutantError(Exception):
    """A mutant cannot be planted, or its tests cannot tell anything."""


@dataclass(frozen=True)
class Mutant:
    """A mistake, and who must find it.

    Attributes:
        name: What it is called; the part before the dot is the package.
        means: What goes wrong.
        file: Where, from the root of the project.
        old: Text that is there once.
        new: What takes its place.
        tests: Arguments of pytest: files or tests, and options such as ``-k``.
        explained: Why no test finds it, of one that survives; it counts as not killed all the same.
    """

    name: str
    means: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    explained: str = ""

    @property
    def test_files(self) -> list[str]:
        """The files that hold its tests."""
        return [word.partition("::")[0] for word in self.tests if word.startswith("tests/")]

    def plant(self, text: str) -> str:
        """Make the mistake in the text of its file.

        Raises:
            MutantError: The place is not there, or more than once.
        """
        count = text.count(self.old)
        if count != 1:
            raise MutantError(
                f"The place of a mutant is found once. Found the one of {self.name} {count} times in {self.file}. "
                f"Correct `old` in its table."
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """What came of a mutant, or of tests without one.

    Attributes:
        key: Stands for all that the result depends on.
        status: ``"killed"``, ``"survived"`` or ``"error"``; ``"passed"`` of tests without a mutant.
        seconds: How long its tests took.
        remark: The test that found it, or what is wrong.
    """

    key: str
    status: str
    seconds: float
    remark: str


def read_mutants(tables: Path = TABLES) -> list[Mutant]:
    """Read all tables."""
    rows = [row for path in sorted(tables.glob("*.toml")) for row in tomllib.loads(path.read_text()).get("mutant", [])]
    return [Mutant(**row | {"tests": tuple(row["tests"])}) for row in rows]


@dataclass(frozen=True)
class Project:
    """What is copied, and what results depend on."""

    root: Path = ROOT

    @cached_property
    def files(self) -> list[str]:
        """The files that git tracks, and new ones that it does not ignore."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True).stdout
        return sorted(name for name in set(listed.split("\0")) if name and (self.root / name).is_file())

    def copy_to(self, folder: Path) -> None:
        """Copy all files; times stay, by which Python knows what it has compiled."""
        for name in self.files:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.root / name, target)

    def key(self, parts: Iterable[object], test_files: Iterable[str]) -> str:
        """Stand for the code, these tests, and the versions that they run with; other tests and pages do not count."""
        own = sorted(set(test_files) & self._digests.keys())
        versions = platform.python_version(), version("torch")
        text = repr((versions, *parts, self._common, [(name, self._digests[name]) for name in own]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def _digests(self) -> dict[str, str]:
        here = [name for name in self.files if name.partition("/")[0] in _SOURCES or name == "pyproject.toml"]
        return {name: hashlib.sha256((self.root / name).read_bytes()).hexdigest() for name in here}

    @cached_property
    def _common(self) -> list[tuple[str, str]]:
        apart = re.compile(r"tests/mutants/|tests/(.*/)?test_\w+\.py|tests/durations\.json")
        return [(name, digest) for name, digest in self._digests.items() if not apart.match(name)]


class Checkout:
    """A copy of the project in which mistakes are planted."""

    def __init__(self, project: Project, folder: Path) -> None:
        self._folder, self.root = folder, folder / "project"
        self._second = 0
        project.copy_to(self.root)
        subprocess.run(["git", "init", "-q"], cwd=self.root, check=True)  # tests ask git which files there are

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Make a mistake, and put the file back as it was."""
        file, before = self.root / mutant.file, self._folder / "before"
        shutil.copy2(file, before)
        try:
            file.write_text(mutant.plant(file.read_text(encoding="utf-8")), encoding="utf-8")
            # Python takes a file of the same size and second for the one that it has compiled already.
            self._second += 1
            os.utime(file, (0, self._second))
            yield
        finally:
            shutil.copy2(before, file)


class Copy(Checkout):
    """A copy of the project in which tests run, of one worker."""

    def __init__(self, project: Project, folder: Path) -> None:
        super().__init__(project, folder)
        paths = os.pathsep.join(str(self.root / part) for part in ("src", "doctest", "tests/helpers"))
        self._warm = subprocess.Popen(
            [sys.executable, TABLES / "warm.py", *IMPORTED],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._is_ready = False

    def run(self, tests: Iterable[str], limit: float | None = None) -> tuple[int | None, float, str]:
        """Run tests until the first failure.

        Returns:
            The exit status of pytest, None where time was up; seconds; and what failed first.
        """
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        output = self._folder / "output"
        words = [str(output), *_PYTEST, "--basetemp", str(self._folder / "tmp"), *tests]
        if not self._is_ready:
            self._is_ready = bool(self._ask())
        begin = time.monotonic()
        number = int(self._ask(json.dumps(words)))
        assert self._warm.stdout
        is_done, _, _ = select.select([self._warm.stdout], [], [], limit)
        if not is_done:
            _kill(number)
        status = int(self._ask())
        return status if is_done else None, time.monotonic() - begin, _first_failure(output.read_text())

    def close(self) -> None:
        """End what runs here."""
        _kill(self._warm.pid)
        self._warm.communicate()

    def _ask(self, line: str = "") -> str:
        """Send a line, if there is one, and read a line."""
        assert self._warm.stdin
        assert self._warm.stdout
        if line:
            self._warm.stdin.write(f"{line}\n")
            self._warm.stdin.flush()
        answer = self._warm.stdout.readline()
        if not answer:
            raise MutantError("The process that runs the tests has ended. Look for what has killed it.")
        return answer


def _kill(number: int) -> None:
    """End a process and all that it started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(number)
        for each in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                each.kill()


def _first_failure(said: str) -> str:
    lines = said.strip().splitlines() or [""]
    return next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1])


class Session:
    """Runs mutants, and keeps what was found."""

    def __init__(self, project: Project, results: Path, folder: Path, jobs: int = 1) -> None:
        self._project, self._file, self._is_over = project, results, False
        self._lock, self._known = threading.Lock(), self._read()
        self._measuring: dict[tuple[str, ...], threading.Lock] = {}
        self._all = [Copy(project, folder / str(index)) for index in range(jobs)]
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in self._all:
            self._free.put(copy)

    def run(self, mutants: Iterable[Mutant]) -> Generator[tuple[Mutant, Result], None, None]:
        """Run mutants, some at the same time, and yield them in their order as they are done."""
        mutants = list(mutants)
        pool = ThreadPoolExecutor(len(self._all))
        try:
            yield from zip(mutants, pool.map(self._result_of, mutants), strict=True)
        finally:
            self._is_over = True  # what was interrupted is no result
            for copy in self._all:
                copy.close()
            pool.shutdown(cancel_futures=True)

    def _result_of(self, mutant: Mutant) -> Result:
        key = self._project.key(astuple(mutant)[:-1], [*mutant.test_files, mutant.file])
        known = self._known.get(mutant.name)
        if known is not None and known.key == key:
            return known
        copy = self._free.get()
        try:
            return self._keep(mutant.name, self._try(mutant, copy, key))
        except MutantError as error:
            return Result(key, "error", 0.0, str(error))
        finally:
            self._free.put(copy)

    def _try(self, mutant: Mutant, copy: Copy, key: str) -> Result:
        plain = self._plain_seconds(mutant, copy)
        limit = FLOOR_SECONDS + FACTOR * plain
        with copy.planted(mutant):
            status, seconds, remark = copy.run(mutant.tests, limit)
        if status == 0:
            return Result(key, "survived", seconds, remark)
        if status == _FAILED:
            return Result(key, "killed", seconds, remark)
        if status is None:
            status, again, _ = copy.run(mutant.tests, limit)
            if status != 0 or again > limit / 2:
                raise MutantError(f"{mutant.name} took more than {limit:.0f} s, and may without it. Run it again.")
            return Result(
                key, "killed", seconds, f"not done after {limit:.0f} s; without it, then, after {again:.0f} s"
            )
        if status < 0:
            return Result(key, "killed", seconds, f"the tests were ended by signal {-status}")
        raise MutantError(f"The tests of {mutant.name} cannot run with it: pytest ends with {status}, {remark}")

    def _plain_seconds(self, mutant: Mutant, copy: Copy) -> float:
        """How long the tests take without a mutant; they must pass."""
        name, key = " ".join(mutant.tests), self._project.key(mutant.tests, mutant.test_files)
        with self._lock:
            measuring = self._measuring.setdefault(mutant.tests, threading.Lock())
        with measuring:
            known = self._known.get(name)
            if known is None or known.key != key:
                status, seconds, remark = copy.run(mutant.tests)
                if status != 0:
                    raise MutantError(f"The tests of {mutant.name} must pass without it. Found {remark}")
                known = self._keep(name, Result(key, "passed", seconds, remark))
        return known.seconds

    def _keep(self, name: str, result: Result) -> Result:
        with self._lock:
            if self._is_over:
                return result
            self._known[name] = result
            self._file.parent.mkdir(parents=True, exist_ok=True)
            beside = self._file.with_suffix(".new")
            beside.write_text(json.dumps({name: asdict(each) for name, each in self._known.items()}, indent=1) + "\n")
            beside.replace(self._file)
        return result

    def _read(self) -> dict[str, Result]:
        if not self._file.is_file():
            return {}
        return {name: Result(**row) for name, row in json.loads(self._file.read_text()).items()}


def report(found: list[tuple[Mutant, Result]]) -> tuple[str, int]:
    """Say how many were killed, name the others, and tell the exit status."""
    by_status = {status: [m for m, r in found if r.status == status] for status in ("killed", "survived", "error")}
    killed, survived, errors = by_status.values()
    unexplained = [mutant for mutant in survived if not mutant.explained]
    stale = [mutant for mutant in killed if mutant.explained]
    lines = [f"{len(killed)} of {len(found)} mutants killed, {len(killed) / len(found):.1%}; {len(errors)} errors"]
    lines += [f"  survived: {m.name}: {m.explained or 'not explained; write a test that finds it'}" for m in survived]
    lines += [f"  killed, and explained as a survivor: {m.name}: drop `explained`" for m in stale]
    fails = errors or unexplained or stale or len(killed) < REQUIRED * len(found)
    return "\n".join(lines) + "\n", int(bool(fails))


def main(words: list[str]) -> int:
    """Run what was asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a mutant, or the beginning of several; all by default"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and what they mean, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at the same time; 1 by default")
    options = parser.parse_args(words)
    mutants = read_mutants()
    wrong = [name for name in options.names if not any(mutant.name.startswith(name) for mutant in mutants)]
    if wrong:
        parser.error(f"no mutant begins with {', '.join(wrong)}; --list prints all")
    chosen = [mutant for mutant in mutants if mutant.name.startswith(tuple(options.names) or "")]
    if options.list:
        sys.stdout.writelines(f"{mutant.name:<44}{mutant.means}\n" for mutant in chosen)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder,
        closing(Session(Project(), RESULTS, Path(folder), options.jobs).run(chosen)) as results,
    ):
        for mutant, result in results:
            found.append((mutant, result))
            sys.stdout.write(f"{result.status:<9}{result.seconds:6.1f} s  {mutant.name:<44}{result.remark[:120]}\n")
            sys.stdout.flush()
    text, status = report(found)
    sys.stdout.write(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
