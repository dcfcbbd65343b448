"""All that needs a GPU, from kernels to tokens per second: ``python tests/gpu/run.py [PART...]``, on 1 to 8 GPUs.

It takes the packages that it finds, installs nothing, and leaves out peers that are missing, by name. The parts come in
the order of what they tell. What is done is kept in ``build/gpu.json`` until the code changes, and not done again, so
``--minutes 9`` may be called until all is there (exit status 3 means that something is left). Results of a GPU become
the table of `docs/measured/gpu.md`. ``--device cpu`` or ``--device pretend`` tries the program out at toy size, and
writes no table. ``--shared 4`` is for machines with too few GPUs: 4 ranks share them, and their collectives pass
through host memory, so that only equality and pages are checked, and nothing is timed; they have a table of their own.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[2]
for _path in (ROOT / "src", ROOT / "tests" / "helpers"):
    sys.path.insert(0, str(_path))

import equal  # noqa: E402
import largest  # noqa: E402
import models  # noqa: E402
import overlap  # noqa: E402
import training  # noqa: E402
from table import write_table  # noqa: E402
from worlds import World, WorldError, once  # noqa: E402

UNFINISHED = 3
TOYS = ("cpu", "pretend")
"""Devices on which the program is tried out."""
TURNS, STEPS = 8, 4
"""Of a race: how often each contender is timed, and how many steps each time."""
_CODE = ("src", "csrc", "tests/gpu", "tests/helpers")
_PAGES = ROOT / "docs" / "source" / "en"
CHECKS = ("kernels", "equality", "pages")
"""Parts that time nothing: their cases may run at once, and on GPUs that ranks share."""


@dataclass(frozen=True)
class Setting:
    """Where it runs.

    Attributes:
        device: ``"cuda"``, ``"cpu"`` or ``"pretend"``.
        count: Number of devices.
        is_toy: Whether sizes are those that only show that the program runs.
        folder: For files that go away.
    """

    device: str
    count: int
    is_toy: bool
    folder: Path

    def once(self, target: str, seconds: float, size: int = 1, **arguments: Any) -> list[Any]:
        """Ask a world for one value of every rank."""
        return once(target, arguments, self.folder, size, self.device, seconds)


class MissingError(Exception):
    """Something is missing here."""


@dataclass(frozen=True)
class Case:
    """One measurement, or one check.

    Attributes:
        part: Which part it belongs to.
        name: Its name there.
        seconds: How long it may take.
        run: Does it. Raises `MissingError` where something is missing, and any other error where it fails.
    """

    part: str
    name: str
    seconds: float
    run: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        part: Of the case.
        name: Of the case.
        status: ``"ok"``, ``"failed"`` or ``"left out"``.
        values: What was measured.
        remark: Why it failed, or was left out.
        seconds: How long it took.
    """

    part: str
    name: str
    status: str
    values: dict[str, Any] = field(default_factory=dict)
    remark: str = ""
    seconds: float = 0.0


# ------------------------------------------------------------------------------------------------------------ the parts


def kernels(setting: Setting) -> Iterator[Case]:
    """The tests that need a GPU: kernels against references, precisions, devices of the launcher."""

    def run(file: Path) -> dict[str, Any]:
        if not has("pytest"):
            raise MissingError("needs pytest")
        report = setting.folder / f"{file.stem}.xml"
        words = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ends with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")
        suite = ET.parse(report).getroot().find("testsuite")  # noqa: S314 (pytest wrote it)
        assert suite is not None
        counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        if counts["failures"] or counts["errors"]:
            failed = [one.get("name") for one in suite.iter("testcase") if one.find("failure") is not None]
            raise RuntimeError(f"failed: {', '.join(filter(None, failed)) or done.stdout.strip()[-300:]}")
        passed = counts["tests"] - counts["skipped"]
        if not passed:
            raise MissingError("all its tests were skipped")
        return {"passed": passed, "skipped": counts["skipped"]}

    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.gpu" in file.read_text(encoding="utf-8") and "gpu" not in file.parent.name:
            yield Case("kernels", str(file.relative_to(ROOT)), 400, partial(run, file))


def equality(setting: Setting) -> Iterator[Case]:
    """Each plugin against plain torch, on one GPU and on all."""

    def run(target: str, name: str, size: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
            answers = setting.once(target, 240, size, name=name, folder=folder)
        worst = equal.worst_of(answer["worst"] for answer in answers)
        if not worst <= 1:
            raise RuntimeError(f"differs from one process {worst:.3g} times as much as rounding explains")
        return {"worst": worst}

    for size in sorted({1, min(2, setting.count), setting.count}):
        for target, table in (("equal:exact", equal.EXACT), ("equal:rounded", equal.ROUNDED)):
            for name, row in table.items():
                if size >= (row[0] if isinstance(row[0], int) else 1):
                    yield Case("equality", f"{name}, {size} ranks", 250, partial(run, target, name, size))


def ceilings(setting: Setting) -> Iterator[Case]:
    """What the device does at most."""
    yield Case("rates", "device", 120, lambda: setting.once("rates:ceilings", 100, is_toy=setting.is_toy)[0])


def speed(setting: Setting) -> Iterator[Case]:
    """Races of training steps, in turns, ours beside peers."""

    def run(names: tuple[str, ...]) -> dict[str, Any]:
        present = [name for name in names if (needed := training.PACKAGES.get(name.split()[0])) is None or has(needed)]
        with ExitStack() as stack:
            worlds = {}
            for name in present:
                arguments = {"contender": name, "is_toy": setting.is_toy, "num_steps": STEPS}
                world = World("training:race", arguments, setting.folder, setting.count, setting.device)
                worlds[name] = stack.enter_context(world)
            first = {name: world.ask(180)[0]["loss"] for name, world in worlds.items()}
            turns: dict[str, list[list[dict[str, float]]]] = {name: [] for name in worlds}
            for turn in range(2 if setting.is_toy else TURNS):
                for name in present[turn % len(present) :] + present[: turn % len(present)]:
                    turns[name].append(worlds[name].ask(120))
        return {name: summary(name, each, first[name], setting) for name, each in turns.items()} | {
            name: {"left out": f"{training.PACKAGES[name.split()[0]]} is not installed"}
            for name in names
            if name not in present
        }

    for name, names in training.RACES.items():
        if name != "tensor parallelism" or setting.count > 1:
            yield Case("speed", name, 520, partial(run, names))


def summary(name: str, turns: list[list[dict[str, float]]], first_loss: float, setting: Setting) -> dict[str, float]:
    """Of a contender: median seconds of a step, tokens of all ranks per second, the highest memory."""
    shape = models.TOY if setting.is_toy else models.FULL
    seconds = statistics.median(max(rank["seconds"] for rank in turn) for turn in turns)
    batches = 1 if name in training.ONE_MODEL else setting.count
    tokens = shape.batch * shape.length * batches
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "flops_per_second": tokens * shape.flops_per_token / seconds / setting.count,
        "peak_bytes": max(rank["peak_bytes"] for turn in turns for rank in turn),
        "first_loss": first_loss,
        "last_loss": turns[-1][0]["loss"],
    }


def adam(setting: Setting) -> Iterator[Case]:
    """Fused Adam, in bytes per second."""
    for kind in ("float32", "bfloat16"):
        for name in ("torch", "HybridAdam"):
            arguments = {"optimizer": name, "kind": kind, "is_toy": setting.is_toy}
            run = partial(lambda given: setting.once("rates:adam", 140, **given)[0], arguments)
            yield Case("adam", f"{name}, {kind}", 150, run)


def fp8(setting: Setting) -> Iterator[Case]:
    """Linear layers in float8 beside those in bfloat16."""
    for kind in ("bf16", "fp8"):
        run = partial(lambda kind: setting.once("rates:linear", 140, kind=kind, is_toy=setting.is_toy)[0], kind)
        yield Case("fp8", kind, 150, run)


def traces(setting: Setting) -> Iterator[Case]:
    """What of communication and copies lies beside computation."""
    for name in overlap.CASES:
        run = partial(
            lambda name: setting.once("overlap:trace", 200, setting.count, name=name, is_toy=setting.is_toy)[0], name
        )
        yield Case("overlap", name, 220, run)


def pages(setting: Setting) -> Iterator[Case]:
    """The tutorials, on the device."""

    def run(name: str, needed: int) -> dict[str, Any]:
        if setting.device == "cuda" and needed > setting.count:
            raise MissingError(f"needs {needed} devices")
        words = [str(ROOT / "docs_test.py"), name, "--lang", "en", "--device", setting.device, "--timeout", "280"]
        done = subprocess.run([sys.executable, *words, "-q"], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr).strip()[-600:])
        return {}

    for file in sorted(_PAGES.rglob("*.md"))[: 1 if setting.is_toy else None]:
        text = file.read_text(encoding="utf-8")
        command = re.search(r"<!-- doc-test-command: (.+?) -->", text)
        if command and command[1] != "none":
            ranks = re.search(r"nproc[-_]per[-_]node[= ](\d+)", command[1])
            name = str(file.relative_to(_PAGES).with_suffix(""))
            yield Case("pages", name, 300, partial(run, name, int(ranks[1]) if ranks else 1))


def sizes(setting: Setting) -> Iterator[Case]:
    """The largest model of each plugin."""
    for name in largest.CASES:
        given = (setting.is_toy, setting.folder, setting.count, setting.device, 150.0)
        yield Case("largest", name, 530, partial(largest.search, name, *given))


PARTS: Mapping[str, Callable[[Setting], Iterator[Case]]] = {
    "rates": ceilings,
    "kernels": kernels,
    "equality": equality,
    "speed": speed,
    "adam": adam,
    "fp8": fp8,
    "overlap": traces,
    "pages": pages,
    "largest": sizes,
}
"""In the order of what they tell."""


def has(package: str) -> bool:
    """Whether a package can be imported here."""
    return importlib.util.find_spec(package) is not None


# ---------------------------------------------------------------------------------------------------------- the program


def run_case(case: Case) -> Result:
    """Do it, and say what came of it."""
    begin = time.monotonic()
    status, values, remark = "ok", {}, ""
    try:
        values = case.run()
    except MissingError as reason:
        status, remark = "left out", str(reason)
    except WorldError as error:
        # A refusal is what a plugin promises to say; what it refuses on a device stands in the table.
        status, remark = "left out" if error.kind == "UnsupportedError" else "failed", str(error)
    except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as error:
        status, remark = "failed", f"{type(error).__name__}: {error}"
    return Result(case.part, case.name, status, values, remark, round(time.monotonic() - begin, 1))


class Book:
    """What was found, in a file, as long as code and machine are the same."""

    def __init__(self, file: Path, machine: Mapping[str, Any]) -> None:
        digest = hashlib.sha256()
        for path in sorted(path for folder in _CODE for path in (ROOT / folder).rglob("*") if path.is_file()):
            if path.suffix in (".py", ".cu", ".cpp", ".h"):
                digest.update(path.read_bytes())
        self._file = file
        self._head = {"code": digest.hexdigest()[:16], "machine": dict(machine)}
        kept = json.loads(file.read_text()) if file.is_file() else {}
        rows = kept.pop("results", []) if kept.get("code") == self._head["code"] else []
        is_same = kept.get("machine") == self._head["machine"]
        self.results = [Result(**row) for row in rows] if is_same else []

    def find(self, case: Case) -> Result | None:
        """What is known of a case; a failure is tried again."""
        kept = [one for one in self.results if (one.part, one.name) == (case.part, case.name)]
        return next((one for one in kept if one.status != "failed"), None)

    def keep(self, result: Result) -> None:
        """Write a result down at once: the next one may end the machine."""
        others = [one for one in self.results if (one.part, one.name) != (result.part, result.name)]
        self.results = [*others, result]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(one) for one in self.results]
        self._file.write_text(json.dumps(self._head | {"results": rows}, indent=1) + "\n")


def machine_of(device: str, count: int, is_toy: bool) -> dict[str, Any]:
    """Say where it runs, and with what."""
    import torch
    from torch.cuda import nccl

    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "device": name,
        "count": count,
        "is_toy": is_toy,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, nccl.version())) if device == "cuda" else "",
    }


def main(words: list[str]) -> int:
    """Run what is left, and return 0 if all of it is done and well, 1 if something failed, 3 if time was up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--device", choices=("cuda", *TOYS), default="cuda")
    parser.add_argument("--count", type=int, help="number of devices; all by default, one on a CPU")
    parser.add_argument(
        "--shared", type=int, help="number of ranks that share the GPUs that there are; only checks run"
    )
    parser.add_argument("--jobs", type=int, default=1, help=f"cases at once of {', '.join(CHECKS)}; 1 by default")
    parser.add_argument("--minutes", type=float, default=45.0, help="begin nothing that may take longer than this")
    parser.add_argument("--results", type=Path, help="build/gpu.json by default")
    parser.add_argument("--table", type=Path, help="docs/measured/gpu.md by default")
    options = parser.parse_args(words)
    name = "gpu-shared" if options.shared else "gpu"
    options.results = options.results or ROOT / "build" / f"{name}.json"
    options.table = options.table or ROOT / "docs" / "measured" / f"{name}.md"
    if wrong := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part is called {', '.join(wrong)}; there are {', '.join(PARTS)}")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use; --device cpu tries the program out at toy size")
    is_toy = options.device in TOYS
    count = options.shared or options.count or (1 if is_toy else torch.cuda.device_count())
    machine = machine_of(options.device, count, is_toy)
    if options.shared:
        share_devices()
        machine |= {"count": torch.cuda.device_count(), "shared_by": options.shared, "nccl": ""}
    book = Book(options.results, machine)
    until, statuses = time.monotonic() + 60 * options.minutes, set[str]()
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        setting = Setting(options.device, count, is_toy, Path(folder))
        for part in options.parts or (CHECKS[1:] if options.shared else PARTS):
            statuses |= run_part(PARTS[part](setting), book, until, options.jobs if part in CHECKS else 1)
    if not is_toy:
        write_table(options.table, machine, [asdict(one) for one in book.results])
    return 1 if "failed" in statuses else UNFINISHED * ("unfinished" in statuses)


def share_devices() -> None:
    """Let the ranks of every process that starts from here take the same devices."""
    paths = [str(ROOT / "tests" / "device"), os.environ.get("PYTHONPATH", "")]
    os.environ.update({"COLOSSAL_SHARED_GPU": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))})


def run_part(cases: Iterator[Case], book: Book, until: float, jobs: int) -> set[str]:
    """Run what is left of a part, and return the statuses."""

    def run(case: Case) -> Result | None:
        return None if time.monotonic() + case.seconds > until else run_case(case)

    statuses, left = set[str](), list[Case]()
    for case in cases:
        if (known := book.find(case)) is None:
            left.append(case)
        else:
            statuses.add(known.status)
            say(known)
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, case) for case in left]):
            result = future.result()
            statuses.add(result.status if result else "unfinished")
            if result:
                book.keep(result)
                say(result)
    return statuses


def say(result: Result) -> None:
    """Print a line."""
    values = result.remark.splitlines()[-1:] if result.remark else [json.dumps(result.values)]
    sys.stdout.write(
        f"{result.status:8} {result.seconds:6.1f} s  {result.part:9} {result.name:36} {''.join(values)[:300]}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
