# pyright: reportMissingImports=false
"""Open the links of a pipeline and use them, and print what was seen: ``links.py``, or ``links.py gone``.

With ``gone`` the last rank ends before it opens its links.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import colossal
from colossal._src.pipeline import Microbatching, PipelineExecutor, Stage
from colossal.accelerator import get_current_device
from colossal.cluster import ParallelMesh
from colossal.errors import CommunicationError
from colossal.interface import OptimizerWrapper
from colossal.pipeline import StagePlacement, partition_uniform

WIDTH = 4


class Numbered(nn.Module):
    """Hands hidden states on, and numbers of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        start = torch.tensor([-300, 300], dtype=torch.int16, device=self.linear.weight.device)
        x, numbers = x if isinstance(x, tuple) else (x, start)
        return self.linear(x), numbers * 2


def made(mesh: ParallelMesh) -> tuple[PipelineExecutor, Stage]:
    torch.manual_seed(0)
    size = mesh.size("pp")
    model = nn.Sequential(*(Numbered() for _ in range(size)))
    stage = Stage.of_sequential(model, partition_uniform(size, size), mesh.rank("pp")).to(get_current_device())
    return PipelineExecutor([stage], StagePlacement(size), mesh, "1f1b", Microbatching(2)), stage


def count_messages() -> list[str]:
    calls: list[str] = []

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(plain.__name__)
            return plain(*args, **kwargs)

        return call

    dist.isend, dist.irecv = counted(dist.isend), counted(dist.irecv)
    return calls


def main(*words: str) -> None:
    world = colossal.launch_from_torch(verbose=False, timeout_seconds=20)
    found: Any = {}
    with ParallelMesh(pp=world.world_size) as mesh:
        if words and mesh.rank("pp") == mesh.size("pp") - 1:
            mesh.blocks("pp", mesh.size("pp"))  # the group of messages to earlier ranks is formed together
            return
        calls = count_messages()
        try:
            run, stage = made(mesh)
        except CommunicationError as error:
            sys.stdout.write(f"{json.dumps(str(error))}\n")
            return
        found["opened"] = len(calls)
        run, stage = made(mesh)
        found["opened_again"] = len(calls) - found["opened"]
        optimizer = OptimizerWrapper(torch.optim.SGD(stage.parameters(), lr=0.1))
        batch = torch.ones(2, WIDTH)
        done = run(iter([batch]), lambda y, _: y[0].mean(), optimizer, return_outputs=True)
        found["numbers"] = done["outputs"][1].tolist() if done["outputs"] else []
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
