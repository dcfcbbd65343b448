"""A program that forks ranks which save asynchronously and end; not a test itself: tests start it.

    python ending.py FOLDER CASE...         a case is PLUGIN,ENDING,PORT

Each rank comes to the end of this program as any process of Python does, so that all that is done at an exit is done.
Its output goes to FOLDER/CASE/RANK.out; the exit codes of all go to FOLDER/codes.json. A plain program, because modules
that take long to import are imported once, and because forking wants one thread.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer of each rank would import
from torch import nn

import colossal
from colossal._src.checkpoint_io import file_writers
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin

PLUGINS: dict[str, Any] = {"none": lambda: None, "ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}
write, ended = file_writers.SafetensorsWriter._write_blocks, threading.Event()


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))


def late(self: file_writers.SafetensorsWriter, arenas: Any, paths: Any) -> Any:
    """Write when the program has begun to end."""
    ended.wait()
    time.sleep(0.5)
    return write(self, arenas, paths)


def be_a_rank(plugin: str, ending: str, folder: Path) -> None:
    file_writers.SafetensorsWriter._write_blocks = late
    if plugin != "none":
        colossal.launch_from_torch(verbose=False)
    net = build()
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    booster.save(folder / "steps", model, optimizer, step=5, use_async=True)
    booster.save_model(model, folder / "model", shard=True, use_safetensors=True, size_per_shard=2, use_async=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if ending == "dissolve":
        booster.checkpoint_io.save_plain(dict, Path(__file__) / "below a file", use_async=True)
    print("complete:", (folder / "model" / "model.safetensors.index.json").exists(), flush=True)  # noqa: T201
    ended.set()
    if ending == "dissolve":
        torch.distributed.destroy_process_group()
    if ending == "exit":
        sys.exit(0)


def fork(case: str, folder: Path) -> list[int] | None:
    """Start the ranks of a case, and return their exit codes; in a rank that comes to its end, None."""
    plugin, ending, port = case.split(",")
    folder.mkdir()
    size, children = 1 if plugin == "none" else 2, []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            output = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(output, stream)
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1")
            be_a_rank(plugin, ending, folder)
            return None
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(folder: Path, cases: list[str]) -> None:
    codes: dict[str, list[int]] = {}
    for case in cases:
        ended_with = fork(case, folder / case)
        if ended_with is None:
            return
        codes[case] = ended_with
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
