"""An exception in a step on one rank of a pipeline is named on the others, which only miss a peer."""

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.pipeline import Microbatching, PipelineExecutor, Stage
from colossal.cluster import ParallelMesh
from colossal.errors import CommunicationError
from colossal.interface import OptimizerWrapper
from colossal.pipeline import StagePlacement, partition_uniform
from colossal.testing import run_processes


def fail_on_the_last_stage() -> str:
    """Raise in the criterion, which only the last stage calls."""
    mesh = ParallelMesh(pp=3)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    stage = Stage.of_sequential(model, partition_uniform(3, 3), mesh.rank("pp"))
    optimizer = OptimizerWrapper(torch.optim.SGD(stage.parameters(), lr=0.1))
    execute = PipelineExecutor([stage], StagePlacement(3, 1), mesh, "1f1b", Microbatching(2))

    def criterion(_outputs: torch.Tensor, _inputs: object) -> torch.Tensor:
        raise ValueError("labels are missing.")

    try:
        execute(iter([torch.ones(4, 2)]), criterion, optimizer)
    except (CommunicationError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()  # as in a process that ends
    return ""


def test_the_rank_whose_step_ended_is_named_on_all() -> None:
    *waiting, failed = run_processes(fail_on_the_last_stage, 3)
    assert failed == "ValueError: labels are missing."
    told = (
        "CommunicationError: A step of a pipeline needs all its ranks. Found that rank 2 ended it by ValueError: "
        "labels are missing. Look at the traceback of that rank."
    )
    assert waiting == [told] * 2
