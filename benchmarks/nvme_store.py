"""How fast tensors go to a disk and come back, against what fio reaches there and against DeepSpeed's async_io.

Every round has each contender write the same bytes over a file that it wrote before, and then read them, in an order
that rotates. Writing ends with fdatasync for all of them, as a write that waits in memory tells nothing about the disk.
Before reading, the file is dropped from the page cache of this system (posix_fadvise DONTNEED), for all of them alike;
what lies below this system, such as the host of a virtual machine, may still hold it. So each contender, and each way
of a peer, has a file of its own, or one that is read often would be found there sooner.

fio is run in each of the ways of `FIO`, and DeepSpeed in each of `DEEPSPEED`; each of them is compared by the way with
the best median: in each direction another one. The ways of DeepSpeed use memory that its handle has pinned, which it
transfers without a copy; all but "default", which is what a user has who sets nothing. It runs in a process of its own,
so perhaps by another interpreter, and builds its extension when it is first used, which takes minutes.

A contender that is not installed is left out, and named.

    python benchmarks/nvme_store.py --directory /mnt/nvme --rounds 7
    python benchmarks/nvme_store.py --only TensorFile 'fio*direct*' 'DeepSpeed*' --python-of deepspeed=/path/to/python
"""

import argparse
import fnmatch
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
import xxhash

if TYPE_CHECKING:  # the interpreter of a peer need not have it
    from colossal.offload import StateStore

WRITE, READ = "write", "read"
ENGINES = (("io_uring", 8), ("io_uring", 32), ("libaio", 8), ("psync", 1))
FIO = tuple(
    (engine, depth, direct, block)
    for engine, depth in ENGINES
    for direct, block in ((1, "1M"), (1, "4M"), (0, "1M"))
    if (engine, depth, direct) != ("io_uring", 32, 0)
)
SLOTS = 16
MIB = 1 << 20
DEEPSPEED = {  # block_size, queue_depth, single_submit, overlap_events, parallelism; requests under way at once
    "default": ((), 1),
    "1M x32": ((MIB, 32, False, True, 1), 1),
    "1M x32, 8 threads": ((MIB, 32, False, True, 8), 1),
    "1M x32 single, 8 threads": ((MIB, 32, True, True, 8), 1),
    "1M x128, 8 threads, 16 requests": ((MIB, 128, False, True, 8), SLOTS),
    "8M x128, 4 threads": ((8 * MIB, 128, False, True, 4), 1),
    "8M x128, 8 threads, 16 requests": ((8 * MIB, 128, False, True, 8), SLOTS),
}
BARS = {"fio": 0.85, "DeepSpeed": 1.8}
Contender = Callable[[str], float]


def drop_cache(path: Path) -> None:
    """Let the next reader of a file read from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@final
class Store:
    """A `TensorFile`, as it is."""

    def __init__(self, directory: Path, memory: torch.Tensor) -> None:
        from colossal._src.offload import TensorFile

        self.parts = memory.chunk(SLOTS)
        self.file = TensorFile(directory, [part.nbytes for part in self.parts])

    def __call__(self, verb: str) -> float:
        """Seconds of one pass."""
        path = Path(f"/proc/self/fd/{self.file._flights.file.buffered}")  # noqa: SLF001 (the file has no name)
        drop_cache(path)
        started = time.perf_counter()
        begin = self.file.write if verb == WRITE else self.file.read
        for request in [begin(slot, part) for slot, part in enumerate(self.parts)]:
            request.wait()
        if verb == WRITE:
            os.fdatasync(self.file._flights.file.buffered)  # noqa: SLF001
        return time.perf_counter() - started


@final
class Walk:
    """A `StateStore` whose states are read, changed and written: both directions at once."""

    def __init__(self, store: "StateStore") -> None:
        self.store = store

    def __call__(self, verb: str) -> float:
        """Seconds of one pass; a write is a pass in both directions here."""
        descriptor = self.store.file._flights.file.buffered  # noqa: SLF001
        drop_cache(Path(f"/proc/self/fd/{descriptor}"))
        started = time.perf_counter()
        for _, tensors in self.store.walk(is_read_only=verb == READ):
            tensors[0][:1] += 1
        os.fdatasync(descriptor)
        return time.perf_counter() - started


@final
class Fio:
    """One way of fio."""

    def __init__(self, directory: Path, num_bytes: int, way: tuple[str, int, int, str]) -> None:
        self.path = directory / "-".join(map(str, ("fio", *way)))
        engine, depth, direct, block = way
        self.command = ["fio", "--name=x", "--overwrite=1", "--end_fsync=1", "--invalidate=1", "--output-format=json"]
        self.command += [f"--ioengine={engine}", f"--iodepth={depth}", f"--direct={direct}", f"--bs={block}"]
        self.command += [f"--size={num_bytes}", f"--filename={self.path}"]
        self.num_bytes = num_bytes

    def __call__(self, verb: str) -> float:
        """Seconds of one pass, as fio counts them: without its start."""
        if self.path.exists():
            drop_cache(self.path)
        done = subprocess.run([*self.command, f"--rw={verb}"], capture_output=True, text=True, check=True)
        (job,) = json.loads(done.stdout)["jobs"]
        return self.num_bytes / job[verb]["bw_bytes"]


@final
class DeepSpeed:
    """The process that runs the extension async_io of DeepSpeed, in all of its ways."""

    def __init__(self, directory: Path, num_bytes: int, python: str) -> None:
        path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"  # ninja, which builds, lies next to it
        command, env = [python, __file__, "--serve", str(num_bytes)], {"DS_ACCELERATOR": "cpu", "PATH": path}
        self._errors = (directory / "deepspeed.log").open("w+")
        self._process = subprocess.Popen(
            [*command, "--directory", directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | env,
        )

    def ask(self, *request: str) -> Any:
        """Return the answer to a request; to none, wait until it is ready.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if request:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"it ended, and said: {self._errors.read()[-3000:].strip()}")
        return json.loads(line)

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate()
        self._errors.close()


def serve(directory: Path, num_bytes: int) -> None:
    """Be the process of DeepSpeed: answer each line of the standard input, a way and a verb, by seconds."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        sys.exit(str(error))

    library: Any = AsyncIOBuilder().load(verbose=False)
    handles = {name: library.aio_handle(*setting) for name, (setting, _) in DEEPSPEED.items()}
    usual = torch.empty(num_bytes, dtype=torch.uint8).random_()
    pinned = handles["default"].new_cpu_locked_tensor(num_bytes, usual).copy_(usual)
    print(json.dumps(list(DEEPSPEED)), file=answers)
    for line in sys.stdin:
        way, verb = json.loads(line)
        parts = (usual if way == "default" else pinned).chunk(DEEPSPEED[way][1])
        path = directory / f"deepspeed {way}"
        path.touch()
        print(json.dumps(deepspeed_pass(handles[way], parts, path, verb)), file=answers)


def deepspeed_pass(handle: Any, parts: tuple[torch.Tensor, ...], path: Path, verb: str) -> float:
    """Seconds of one pass."""
    drop_cache(path)
    started = time.perf_counter()
    begin = handle.async_pwrite if verb == WRITE else handle.async_pread
    for number, part in enumerate(parts):
        assert begin(part, str(path), number * parts[0].nbytes) == 0
    assert handle.wait() == len(parts)
    if verb == WRITE:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
    return time.perf_counter() - started


def contenders(directory: Path, memory: torch.Tensor, python: str, exits: ExitStack) -> dict[str, Contender]:
    """Everything that is installed."""
    from colossal.offload import StateStore

    ours = Store(directory, memory)
    numels = [memory.nbytes // SLOTS // 8] * SLOTS
    walk = Walk(exits.enter_context(StateStore(directory, numels)))
    exits.callback(ours.file.close)
    print(f"TensorFile: {ours.file.engine}, {ours.file.direct}")
    found: dict[str, Contender] = {"TensorFile": ours, "StateStore.walk": walk}
    if shutil.which("fio"):
        names = {f"fio {way[0]} x{way[1]} {('buffered', 'direct')[way[2]]} {way[3]}": way for way in FIO}
        found |= {name: Fio(directory, memory.nbytes, way) for name, way in names.items()}
    else:
        print("fio is not installed: left out")
    process = DeepSpeed(directory, memory.nbytes, python)
    exits.callback(process.close)
    try:
        found |= {f"DeepSpeed {way}": partial(process.ask, way) for way in process.ask()}
    except RuntimeError as error:  # whatever keeps it from being built
        print(f"DeepSpeed cannot be used: left out ({error})")
    return found


def measure(found: dict[str, Contender], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each contender and direction in each round; the first round is not counted."""
    names = list(found)
    seconds: dict[str, dict[str, list[float]]] = {verb: {name: [] for name in names} for verb in (WRITE, READ)}
    for number in range(rounds + 1):
        start = number * len(names) // (rounds + 1)
        for verb in (WRITE, READ):
            for name in names[start:] + names[:start]:
                os.sync()
                value = found[name](verb)
                if number:
                    seconds[verb][name].append(value)
    return seconds


def report(seconds: dict[str, dict[str, list[float]]], num_bytes: int) -> None:
    """Print medians, and the ratios that the bars are about."""
    for verb, values in seconds.items():
        rates = {name: num_bytes / 1e6 / statistics.median(each) for name, each in values.items()}
        for name, rate in sorted(rates.items(), key=lambda pair: -pair[1]):
            fast, slow = (num_bytes / 1e6 / limit(values[name]) for limit in (min, max))
            print(f"{verb:5} {name:42} {rate:7.0f} MB/s   ({slow:.0f} to {fast:.0f})")
        for kind, bar in BARS.items() if "TensorFile" in rates else ():
            peer = max((name for name in rates if name.startswith(kind)), key=lambda name: rates[name], default=None)
            if peer is not None:
                pairs = zip(values[peer], values["TensorFile"], strict=True)
                paired = statistics.median(theirs / ours for theirs, ours in pairs)
                ratio = rates["TensorFile"] / rates[peer]
                print(f"{verb:5} TensorFile / {peer}: {ratio:.2f}; of the pairs {paired:.2f}   (bar: {bar})")


def main() -> None:
    """Read the command line and measure; or, started by itself, be the process of DeepSpeed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk in question")
    parser.add_argument("--only", nargs="+", default=["*"], help="names of contenders, or patterns")
    parser.add_argument("--python-of", nargs="+", default=[], metavar="PACKAGE=INTERPRETER", help="of deepspeed")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.directory, arguments.serve)
        return
    from colossal.kernel import huge_zeros

    python = dict(item.split("=", 1) for item in arguments.python_of).get("deepspeed", sys.executable)
    num_bytes = arguments.megabytes << 20
    (memory,) = huge_zeros([(num_bytes,)], torch.uint8)
    memory.random_()
    digest = xxhash.xxh3_64_hexdigest(memory.numpy().data)
    with ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
        found = contenders(directory, memory, python, exits)
        patterns = arguments.only
        found = {name: each for name, each in found.items() if any(fnmatch.fnmatch(name, one) for one in patterns)}
        print(f"{num_bytes / 1e6:.0f} MB in {directory.parent}; medians of {arguments.rounds} rounds; the rate of")
        print("StateStore.walk under `write` counts its bytes once: it reads and writes them")
        seconds = measure(found, arguments.rounds)
        if "TensorFile" in found:
            memory.zero_()
            found["TensorFile"](READ)
            assert xxhash.xxh3_64_hexdigest(memory.numpy().data) == digest, "what was read is not what was written"
        report(seconds, num_bytes)


if __name__ == "__main__":
    main()
