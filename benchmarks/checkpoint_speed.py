"""How fast checkpoints are saved and loaded, against the disk itself and against other writers.

Every round times each contender once, in an order that rotates, on the same 419 MB in 100 tensors. "disk" is a plain
sequential writer or reader of the same bytes in the same number of files: what the disk gives. Writing includes fsync,
and the cache of the file system is dropped before reading. "blocks" is the time after which training may go on.

    python benchmarks/checkpoint_speed.py --rounds 7 --folder /tmp
    torchrun --standalone --nproc_per_node=2 benchmarks/checkpoint_speed.py     each rank writes and reads its half
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

import colossal
from colossal.accelerator import get_accelerator
from colossal.checkpoint_io import CheckpointIO, ProcessGroupIO, SingleProcessIO
from colossal.cluster import current_mesh
from colossal.tensor import local_of

ELEMENTS, SHARDS = 1024 * 1024, 4
CHUNK = 1 << 24


def build_model(tensors: int) -> nn.Module:
    """Tensors of 4 MiB; under torchrun each rank holds its part of every one."""
    torch.manual_seed(0)
    model = nn.ParameterDict({f"p{n:03d}": nn.Parameter(torch.randn(1024, ELEMENTS // 1024)) for n in range(tensors)})
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=current_mesh().device_mesh["dp"])
    return model


def local_bytes(model: nn.Module) -> int:
    """Bytes that this rank holds."""
    return sum(local_of(parameter).nbytes for parameter in model.parameters())


class Contenders:
    """What is timed, by name; each writes to and reads from a folder of its own."""

    def __init__(self, folder: Path, tensors: int) -> None:
        self.folder = folder
        self.model, self.num_bytes = build_model(tensors), 4 * tensors * ELEMENTS
        self.io = CheckpointIO(ProcessGroupIO() if dist.is_initialized() else SingleProcessIO())
        self.buffer = memoryview(bytearray(torch.ones(CHUNK, dtype=torch.uint8).numpy().tobytes()))
        self.target = bytearray(CHUNK)
        self.pending: Any = None
        # The thread that saves for dcp must not meet the barriers of the main thread in one group.
        self.dcp_group: Any = dist.new_group() if dist.is_initialized() else None
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def path(self, name: str) -> Path:
        """The folder of a contender."""
        return self.folder / name

    def write_disk(self) -> None:
        """Write the bytes of this rank, file after file."""
        self.path("disk").mkdir(parents=True, exist_ok=True)
        share = local_bytes(self.model) // SHARDS
        for number in range(SHARDS):
            with (self.path("disk") / f"{self.rank}-{number}").open("wb", buffering=0) as file:
                for start in range(0, share, CHUNK):
                    file.write(self.buffer[: min(CHUNK, share - start)])
                os.fsync(file.fileno())

    def read_disk(self) -> None:
        """Read them again."""
        for number in range(SHARDS):
            with (self.path("disk") / f"{self.rank}-{number}").open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while file.readinto(self.target):
                    pass

    def save_ours(self, *, use_async: bool = False) -> None:
        """Save safetensors shards."""
        size = self.num_bytes / SHARDS / 2**20
        self.io.save_model(
            self.model,
            self.path("ours"),
            shard=True,
            size_per_shard=size,
            use_safetensors=True,
            use_async=use_async,
        )

    def load_ours(self) -> None:
        """Load them into the model."""
        self.io.load_model(self.model, self.path("ours"))

    def save_dcp(self) -> None:
        """Save by torch.distributed.checkpoint."""
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=self.path("dcp"))

    def load_dcp(self) -> None:
        """Load by torch.distributed.checkpoint."""
        dcp.load({"model": self.model.state_dict()}, checkpoint_id=self.path("dcp"))

    def save_safetensors(self) -> None:
        """Save one file by the package safetensors."""
        from safetensors.torch import save_file

        path = self.path("safetensors")
        path.mkdir(parents=True, exist_ok=True)
        save_file(dict(self.model.state_dict()), path / "model")
        with (path / "model").open("rb") as file:
            os.fsync(file.fileno())

    def load_safetensors(self) -> None:
        """Load it into the model."""
        from safetensors.torch import load_file

        self.model.load_state_dict(load_file(self.path("safetensors") / "model"))

    def start_dcp(self) -> None:
        """Begin an asynchronous save by torch.distributed.checkpoint."""
        self.pending = dcp.async_save(
            {"model": self.model.state_dict()}, checkpoint_id=self.path("dcp"), process_group=self.dcp_group
        )

    def finish_dcp(self) -> None:
        """Wait for it."""
        self.pending.result()


def drop_cache(folder: Path) -> None:
    """Let the next reader read from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def together() -> None:
    """Let all ranks begin at the same time."""
    if dist.is_initialized():
        dist.barrier()


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call, until all ranks are done."""
    together()
    start = time.perf_counter()
    action()
    together()
    return time.perf_counter() - start


def peak_extra(action: Callable[[], object]) -> int:
    """Bytes of memory that a call takes beyond what was in use before."""
    accelerator = get_accelerator("cpu")
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    action()
    return accelerator.max_memory_allocated() - before


def measure(contenders: Contenders, rounds: int) -> dict[str, list[float]]:
    """Time everything, and check that each loads what it saved."""
    alone = not dist.is_initialized()
    actions: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "disk": (contenders.write_disk, contenders.read_disk),
        "ours": (contenders.save_ours, contenders.load_ours),
        "dcp": (contenders.save_dcp, contenders.load_dcp),
    }
    if alone:
        actions["safetensors"] = (contenders.save_safetensors, contenders.load_safetensors)
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        names = list(actions)
        names = names[number % len(names) :] + names[: number % len(names)]
        for name in names:
            clear(contenders, name)
            add(seconds, f"{name} save", timed(actions[name][0]))
        drop_cache(contenders.folder) if contenders.rank == 0 else None
        for name in names:
            add(seconds, f"{name} load", timed(actions[name][1]))
        if number == 0:
            check_loaded(contenders, {name: load for name, (_, load) in actions.items() if name != "disk"})
        time_async(contenders, seconds)
        if number == 0:
            first = {name: values for name, values in seconds.items() if name.endswith("blocks")}
            seconds = {f"{name} the first time": values for name, values in first.items()}
    clear(contenders, "ours")
    add(seconds, "extra MB while saving", peak_extra(contenders.save_ours) / 1e6)
    drop_cache(contenders.folder)
    add(seconds, "extra MB while loading", peak_extra(contenders.load_ours) / 1e6)
    return seconds


def check_loaded(contenders: Contenders, loads: dict[str, Callable[[], None]]) -> None:
    """Load into other values with each contender, and compare with what was saved."""
    parameters = [local_of(parameter).detach() for parameter in contenders.model.parameters()]
    expected = [parameter.clone() for parameter in parameters]
    for name, load in loads.items():
        for parameter in parameters:
            parameter.zero_()
        load()
        for parameter, value in zip(parameters, expected, strict=True):
            assert torch.equal(parameter, value), f"{name} loads something else than it saved"


def time_async(contenders: Contenders, seconds: dict[str, list[float]]) -> None:
    """Time what blocks the training, and check that it is not the writing."""
    clear(contenders, "ours")
    add(seconds, "ours blocks", timed(lambda: contenders.save_ours(use_async=True)))
    add(seconds, "ours in the background", timed(contenders.io.synchronize))
    clear(contenders, "dcp")
    add(seconds, "dcp blocks", timed(contenders.start_dcp))
    add(seconds, "dcp in the background", timed(contenders.finish_dcp))


def clear(contenders: Contenders, name: str) -> None:
    """Delete what a contender wrote, so that every save begins alike."""
    together()
    if contenders.rank == 0:
        shutil.rmtree(contenders.path(name), ignore_errors=True)
        os.sync()
    together()


def add(seconds: dict[str, list[float]], name: str, value: float) -> None:
    """Note one measurement."""
    seconds.setdefault(name, []).append(value)


def report(seconds: dict[str, list[float]], num_bytes: int) -> None:
    """Print medians, and the ratios that the claims are about."""
    megabytes, tensors, rounds = num_bytes / 1e6, num_bytes // ELEMENTS // 4, len(seconds["disk save"])
    print(f"{megabytes:.0f} MB in {tensors} tensors, {SHARDS} files; medians of {rounds} rounds")
    for name, values in seconds.items():
        median = statistics.median(values)
        if "MB" in name:
            print(f"{name:32} {median:8.0f}    (one shard is {megabytes / SHARDS:.0f} MB)")
        else:
            rate = f"{megabytes / median:6.0f} MB/s" if name.endswith(("save", "load")) else ""
            print(f"{name:32} {median * 1e3:8.1f} ms  ({min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}) {rate}")
    for verb in ("save", "load"):
        pairs = zip(seconds[f"disk {verb}"], seconds[f"ours {verb}"], strict=True)
        print(f"{verb}: {statistics.median(disk / ours for disk, ours in pairs):.0%} of what the disk gives")


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tensors", type=int, default=100, help="of 4 MiB each")
    parser.add_argument("--folder", type=Path, default=Path("build"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        colossal.launch_from_torch(verbose=False)
    folder = arguments.folder.absolute() / "checkpoint_speed"
    folder.mkdir(parents=True, exist_ok=True)
    contenders = Contenders(folder, arguments.tensors)
    seconds = measure(contenders, arguments.rounds)
    if not dist.is_initialized() or dist.get_rank() == 0:
        report(seconds, contenders.num_bytes)
    together()
    shutil.rmtree(folder, ignore_errors=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
