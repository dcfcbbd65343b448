"""An exception in a step on one rank of a pipeline is named on the others, which only miss a peer."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

from colossal._src.pipeline import Microbatching, PipelineExecutor, Stage
from colossal._src.pipeline.step_error import StepError
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


def miss_a_peer(step_error: StepError) -> str:
    with pytest.raises(CommunicationError) as error, step_error.explain():
        raise CommunicationError("A peer is missing.")
    return str(error.value)


def fail_in_the_pipelines_of_two_meshes() -> list[str]:
    """Note an error in one of two replicas, then in a pipeline of all ranks, some of which had more of them before."""
    replicas, rank = ParallelMesh(dp=2, pp=2), dist.get_rank()
    if replicas.rank("dp") == 0:
        StepError(replicas)
    first, second = StepError(replicas), StepError(replicas)
    if rank == 3:
        first.write(ValueError("labels are missing."))
    dist.barrier()
    messages = [miss_a_peer(first), miss_a_peer(second)]
    of_all = StepError(ParallelMesh(pp=4))
    if rank == 0:
        of_all.write(ValueError("the disk is full."))
    dist.barrier()
    return [*messages, miss_a_peer(of_all), miss_a_peer(StepError(replicas))]


def test_a_rank_of_the_own_pipeline_is_named() -> None:
    nothing, told = "A peer is missing.", "Found that rank {} ended it by ValueError: {}. Look at"
    for rank, (first, *others, of_all, later) in enumerate(run_processes(fail_in_the_pipelines_of_two_meshes, 4)):
        assert told.format(0, "the disk is full") in of_all
        assert [*others, later] == [nothing] * 2
        if rank in {1, 3}:
            assert told.format(3, "labels are missing") in first
        else:
            assert first == nothing


def test_the_rank_whose_step_ended_is_named_on_all() -> None:
    *waiting, failed = run_processes(fail_on_the_last_stage, 3)
    assert failed == "ValueError: labels are missing."
    told = (
        "CommunicationError: A step of a pipeline needs all its ranks. Found that rank 2 ended it by ValueError: "
        "labels are missing. Look at the traceback of that rank."
    )
    assert waiting == [told] * 2
