"""A step of AdamW whose means lie on a disk, against its I/O alone and its arithmetic alone.

The parameters are those of a GPT-2. In every round each of these takes one turn, in an order that rotates; the first
round is not counted, and medians are compared:

- offloaded: a step of HybridAdam with `nvme_offload_fraction=1.0`.
- walk: the same reads and writes of the same file by themselves, both directions at once, as the step has them: its own
  walk over all pieces, in which nothing is computed. This is the I/O time of the bar.
- memory: a step of HybridAdam over the same parameters, whose means lie in memory. This is the compute time.
- read, write: the same bytes as streams of a `TensorFile` in one direction each. Their sum is what the disk takes for
  the bytes when the directions do not disturb each other; it is printed, and is not of the bar.

The ratio of the bar is offloaded / max(walk, memory). A step by itself does not call fdatasync, as what lies there ends
with the process. Here every turn that writes ends with one, inside its time, so that no bytes wait in memory at the
end; and before every turn its file is dropped from the page cache of this system, outside the time.

"fp32" is a step of float32 parameters; "masters" one that writes a copy of each in bfloat16 in the same pass, as with
mixed precision.

    python benchmarks/nvme_step.py --directory /mnt/nvme --rounds 9
    python benchmarks/nvme_step.py --layers 24 --width 1024 --threads 8
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colossal._src.offload import FileRequest, TensorFile
from colossal.kernel import huge_zeros
from colossal.nn.optimizer import HybridAdam

LR, WEIGHT_DECAY, BAR = 1e-4, 0.01, 1.15
OFFLOADED, WALK, MEMORY, READ, WRITE = "offloaded", "walk", "memory", "read", "write"
KINDS = ("fp32", "masters")
SLOT_BYTES = 16 << 20
VOCABULARY, POSITIONS = 50257, 1024


def shapes(layers: int, width: int) -> list[tuple[int, ...]]:
    """The parameters of a GPT-2 in the order in which it has them."""
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    perceptron = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(VOCABULARY, width), (POSITIONS, width), *(norm + attention + norm + perceptron) * layers, *norm]


def parameters(layers: int, width: int) -> list[torch.nn.Parameter]:
    """Small values with small gradients."""
    found = [torch.nn.Parameter(torch.empty(shape).uniform_(-0.05, 0.05)) for shape in shapes(layers, width)]
    for param in found:
        param.grad = torch.empty_like(param).uniform_(-1e-3, 1e-3)
    return found


def timed(action: Callable[[], object], descriptors: Sequence[int]) -> float:
    """Seconds until something is done and what it wrote is on the disk."""
    os.sync()
    for descriptor in descriptors:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    action()
    for descriptor in descriptors:
        os.fdatasync(descriptor)
    return time.perf_counter() - started


def descriptor_of(file: TensorFile) -> int:
    """The descriptor of a file that has no name."""
    return file._flights.file.buffered  # noqa: SLF001


def transfer(begin: Callable[[int, torch.Tensor], FileRequest], parts: Sequence[torch.Tensor]) -> None:
    """Move everything in one direction."""
    for request in [begin(slot, part) for slot, part in enumerate(parts)]:
        request.wait()


def optimizer_of(params: list[torch.nn.Parameter], kind: str, **options: Any) -> HybridAdam:
    """An optimizer that has taken its first step."""
    optimizer = HybridAdam(params, lr=LR, weight_decay=WEIGHT_DECAY, **options)
    if kind == "masters":
        optimizer.set_param_copies({param: torch.empty_like(param, dtype=torch.bfloat16) for param in params})
    optimizer.step()
    return optimizer


def contenders(
    params: list[torch.nn.Parameter], kind: str, directory: Path, exits: ExitStack
) -> dict[str, Callable[[], float]]:
    """What takes a turn in each round; each returns its seconds."""
    usual = optimizer_of(params, kind)
    offloaded = optimizer_of(params, kind, nvme_offload_fraction=1.0, nvme_offload_dir=str(directory))
    disk = offloaded._disk  # noqa: SLF001 (the same file, in the same order)
    assert disk is not None
    exits.callback(disk.close)
    files = [store.file for store in disk._stores]  # noqa: SLF001
    (memory,) = huge_zeros([(disk.num_bytes,)], torch.uint8)
    memory.random_()
    parts = memory.split(SLOT_BYTES)
    stream = exits.enter_context(TensorFile(directory, [part.nbytes for part in parts]))
    print(f"{kind}: {disk.num_bytes / 1e6:.0f} MB of means; {stream.engine}, {stream.direct}", flush=True)
    own, other = [descriptor_of(file) for file in files], [descriptor_of(stream)]
    return {
        OFFLOADED: partial(timed, offloaded.step, own),
        WALK: partial(timed, lambda: deque(disk.walk(params), maxlen=0), own),
        MEMORY: partial(timed, usual.step, []),
        READ: partial(timed, partial(transfer, stream.read, parts), other),
        WRITE: partial(timed, partial(transfer, stream.write, parts), other),
    }


def check(kind: str, directory: Path) -> None:
    """Compare parameters after two steps whose means lie on the disk, and in memory."""
    torch.manual_seed(0)
    usual = [torch.nn.Parameter(torch.rand(size)) for size in (7, 1000, 70_001)]
    offloaded = [torch.nn.Parameter(param.detach().clone()) for param in usual]
    for one, other in zip(usual, offloaded, strict=True):
        one.grad = torch.rand_like(one)
        other.grad = one.grad.clone()
    on_disk = {"nvme_offload_fraction": 1.0, "nvme_offload_dir": str(directory)}
    for params, options in ((usual, {}), (offloaded, on_disk)):
        optimizer_of(params, kind, **options).step()
    assert all(map(torch.equal, usual, offloaded)), "steps with means on a disk differ from those in memory"


def measure(turns: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in each round but the first."""
    names, seconds = list(turns), {name: [] for name in turns}
    for number in range(rounds + 1):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            value = turns[name]()
            if number:
                seconds[name].append(value)
    return seconds


def report(seconds: dict[str, list[float]], num_bytes: int) -> None:
    """Print medians, and the ratio that the bar is about."""
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    passes = {OFFLOADED: 2, WALK: 2, MEMORY: 0, READ: 1, WRITE: 1}
    for name, values in seconds.items():
        rate = f"   {passes[name] * num_bytes / 1e6 / middle[name]:5.0f} MB/s" if passes[name] else ""
        print(f"  {name:10} {middle[name]:7.3f} s   ({min(values):.3f} to {max(values):.3f}){rate}")
    longest = max(middle[WALK], middle[MEMORY])
    rounds = zip(seconds[OFFLOADED], seconds[WALK], seconds[MEMORY], strict=True)
    paired = statistics.median(step / max(*others) for step, *others in rounds)
    streams = max(middle[READ] + middle[WRITE], middle[MEMORY])
    ratio = middle[OFFLOADED] / longest
    print(f"  offloaded / max(walk, memory): {ratio:.3f}; of the rounds {paired:.3f}   (bar: {BAR})")
    print(f"  offloaded / max(read + write, memory): {middle[OFFLOADED] / streams:.3f}   (no bar)")
    print(f"  offloaded / memory: {middle[OFFLOADED] / middle[MEMORY]:.2f}   (no bar)", flush=True)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk in question")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    params = parameters(arguments.layers, arguments.width)
    numel = sum(param.numel() for param in params)
    print(f"{numel / 1e6:.1f}M parameters, {arguments.threads} threads; medians of {arguments.rounds} rounds")
    for kind in arguments.kinds:
        with ExitStack() as exits:
            directory = Path(exits.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
            check(kind, directory)
            report(measure(contenders(params, kind, directory, exits), arguments.rounds), 8 * numel)


if __name__ == "__main__":
    main()
