"""A program that forks savers and kills them; not a test itself: tests start it, because forking wants one thread.

    python killed.py KIND random COUNT FOLDER         kills at random times
    python killed.py KIND events FIRST:STEP FOLDER    kills at every STEP-th thing that is done to the file system

A saver saves a model whose values are all k, for k = 1, 2, ..., over and over, into the same place. After each kill the
checkpoint must load and hold the last k that was finished, or the one that was being saved.
"""

import mmap
import os
import random
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossal._src.checkpoint_io import CheckpointManager
from colossal.checkpoint_io import CheckpointIO

FILE_EVENTS = ("open", "os.", "shutil.", "pathlib.")
KILLED = -signal.SIGKILL


class Net(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        for number, size in enumerate((20_000, 3, 70_000, 40_000)):
            self.register_parameter(f"p{number}", nn.Parameter(torch.full((size,), float(value))))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1.0, momentum=0.5)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach().clone()
    return optimizer


def save_sharded(io: CheckpointIO, value: int, path: Path, **options: Any) -> None:
    io.save_model(Net(value), path, shard=True, use_safetensors=True, size_per_shard=0.2, **options)


def save_steps(io: CheckpointIO, value: int, path: Path, **options: Any) -> None:
    model = Net(value)
    CheckpointManager(path, io).save(model, optimizer_of(model), None, step=value // 2, keep=1 + value % 2, **options)


Save = Callable[[CheckpointIO, int, Path], None]
SAVES: dict[str, Save] = {
    "file": lambda io, value, path: io.save_model(Net(value), path, use_safetensors=True),
    "torch-file": lambda io, value, path: io.save_model(Net(value), path),
    "sharded": save_sharded,
    "changing-format": lambda io, value, path: io.save_model(
        Net(value), path, shard=True, use_safetensors=value % 2 == 0, size_per_shard=0.2
    ),
    "optimizer": lambda io, value, path: io.save_optimizer(optimizer_of(Net(value)), path, shard=True),
    "steps": save_steps,
    "async-sharded": lambda io, value, path: save_sharded(io, value, path, use_async=True),
    "async-steps": lambda io, value, path: save_steps(io, value, path, use_async=True),
}


def load(kind: str, path: Path) -> int:
    """Load what is there; return the one value of which it must consist."""
    model = Net(-1.0)
    if kind == "optimizer":
        optimizer = optimizer_of(model)
        CheckpointIO().load_optimizer(optimizer, path)
        tensors = [entry["momentum_buffer"] for entry in optimizer.state.values()]
    elif kind.endswith("steps"):
        optimizer = optimizer_of(model)
        CheckpointManager(path, CheckpointIO()).load(model, optimizer, None)
        tensors = [*model.parameters(), *(entry["momentum_buffer"] for entry in optimizer.state.values())]
    else:
        CheckpointIO().load_model(model, path)
        tensors = list(model.parameters())
    values = {value for tensor in tensors for value in tensor.unique().tolist()}
    if len(values) != 1:
        raise SystemExit(f"{kind}: a mixture of the saves {sorted(values)} was loaded")
    return int(values.pop())


def be_a_saver(kind: str, path: Path, first: int, finished: mmap.mmap, die_at: int | None) -> None:
    """Save until killed, or until one more save is finished; note the last finished one in shared memory."""
    torch.set_num_threads(1)
    if die_at is not None:
        count_events(die_at)
    io = CheckpointIO()
    for value in range(first, first + (1 if die_at is not None else 10_000)):
        SAVES[kind](io, value, path)
        if kind.startswith("async"):
            io.synchronize()
        finished[:8] = struct.pack("q", value)
    os._exit(0)


def count_events(die_at: int) -> None:
    seen = [0]

    def look(event: str, _arguments: object) -> None:
        if event.startswith(FILE_EVENTS):
            seen[0] += 1
            if seen[0] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def run_saver(kind: str, path: Path, finished: mmap.mmap, die_at: int | None, draw: random.Random) -> int:
    """Let a saver work; kill it within one of its first saves unless it kills itself. Return how it ended."""
    first = struct.unpack("q", finished[:8])[0] + 1
    child = os.fork()
    if child == 0:
        be_a_saver(kind, path, first, finished, die_at)
    if die_at is None:
        begun, saves = time.monotonic(), draw.randrange(3)
        while struct.unpack("q", finished[:8])[0] < first + saves - 1:
            time.sleep(0.0005)
        each = (time.monotonic() - begun) / max(1, saves)
        time.sleep(draw.uniform(0, 1.2 * max(each, 0.003)))
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check(kind: str, path: Path, finished: mmap.mmap) -> None:
    done = struct.unpack("q", finished[:8])[0]
    found = load(kind, path)
    if found not in (done, done + 1):
        raise SystemExit(f"{kind}: save {done} was finished, and {found} was loaded")
    finished[:8] = struct.pack("q", found)  # the next saver goes on from what is there


def main(kind: str, how: str, numbers: str, folder: Path) -> None:
    torch.set_num_threads(1)
    *firsts, number = map(int, numbers.split(":"))
    draw = random.Random(kind)  # noqa: S311 - repeatable on purpose
    finished = mmap.mmap(-1, 8)
    path = folder / "checkpoint"
    SAVES[kind.removeprefix("async-") if kind.startswith("async") else kind](CheckpointIO(), 1, path)
    finished[:8] = struct.pack("q", 1)
    kills, die_at = 0, next(iter(firsts), 1)
    while how == "events" or kills < number:
        ended = run_saver(kind, path, finished, die_at if how == "events" else None, draw)
        if ended not in (0, KILLED):
            raise SystemExit(f"{kind}: a saver ended with exit code {ended}")
        check(kind, path, finished)
        if ended == 0:
            break  # it came to the end before the event at which it was to die
        kills, die_at = kills + 1, die_at + number
    if how == "random":
        if struct.unpack("q", finished[:8])[0] < number // 2:
            raise SystemExit(f"{kind}: hardly a save was finished between the kills, which proves little")
        left = [entry for entry in folder.rglob(".*") if entry.name.endswith(".tmp")]
        SAVES["steps" if kind.endswith("steps") else kind.removeprefix("async-")](CheckpointIO(), 10**6, path)
        again = [entry for entry in folder.rglob(".*") if entry.name.endswith(".tmp")]
        if again:
            raise SystemExit(f"{kind}: {again} of {left} were left behind by the next save")
    shutil.rmtree(folder)
    print(f"{kind}: {kills} kills, 0 lost checkpoints")  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
