# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""What an executor does besides a plain step: other shapes, evaluation, frozen stages, and what goes wrong."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from colossal._src.pipeline import (
    Microbatching,
    PipelineExecutor,
    PipelineStyle,
    Stage,
    broadcast_tied_parameters,
    copy_structure,
)
from colossal.cluster import ParallelMesh
from colossal.errors import CommunicationError, ConfigError, ShapeError
from colossal.interface import OptimizerWrapper
from colossal.pipeline import StagePlacement, partition_uniform
from colossal.testing import WorldError, fake_world, run_processes

WIDTH = 8
STYLES: list[PipelineStyle] = ["1f1b", "interleaved", "zbv"]


class Wide(nn.Module):
    """Hands a tuple to the next layer, part of which needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = x if isinstance(x, tuple) else (x, x[..., :1] > 0)
        return torch.tanh(self.linear(x)) * mask, mask


class Narrow(nn.Module):
    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return x[0].sum(-1)


def model_of(num_layers: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Wide() for _ in range(num_layers - 1)), Narrow()).double()


def batch_of(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8, length, WIDTH, generator=draw, dtype=torch.float64)
    return {"input": x, "target": torch.randn(8, length, generator=draw, dtype=torch.float64)}


def criterion(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return (outputs - inputs["target"]).square().mean()


def pipeline(
    mesh: ParallelMesh, style: PipelineStyle, frozen: int = 0, **options: Any
) -> tuple[PipelineExecutor, list[Stage], OptimizerWrapper]:
    placement = StagePlacement(mesh.size("pp"), 1 if style == "1f1b" else 2, is_v=style == "zbv")
    model = model_of(placement.num_stages + 2)
    for layer in model[:frozen]:
        layer.requires_grad_(False)
    layers = partition_uniform(len(model), placement.num_stages)
    own = placement.stages_of(mesh.rank("pp"))
    stages = [Stage.of_sequential(_sequence(copy_structure(model)), layers, index) for index in own]
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = OptimizerWrapper(torch.optim.AdamW(parameters or [torch.zeros(1)], lr=0.1))
    run = PipelineExecutor(stages, placement, mesh, style, Microbatching(microbatch_size=2), **options)
    return run, stages, optimizer


def _sequence(model: nn.Module) -> nn.Sequential:
    assert isinstance(model, nn.Sequential)
    return model


# ------------------------------------------------------------------------------------------ what it can


def train(style: PipelineStyle, size: int, frozen: int, caches: bool) -> dict[str, Any]:
    """Three steps with batches of other lengths, and an evaluation after each."""
    with ParallelMesh(pp=size) as mesh:
        run, stages, optimizer = pipeline(mesh, style, frozen, enable_metadata_cache=caches)
        losses, evaluated = [], []
        for length in (3, 5, 3):
            losses.append(run(iter([batch_of(length)]), criterion, optimizer)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                evaluated.append(run(iter([batch_of(4)]), criterion, optimizer, return_outputs=True))
        with run.record() as recorded:
            run(iter([batch_of(3)]), criterion, optimizer, return_loss=False)
        silent = run(iter([batch_of(3)]), criterion, return_loss=False)
        grads = any(p.grad is not None for stage in stages for p in stage.parameters() if p.requires_grad)
        state = {name: value for stage in stages for name, value in stage.module.state_dict().items()}
    return {
        "losses": losses,
        "evaluated": evaluated,
        "state": state,
        "silent": silent,
        "grads": grads,
        "timeline": recorded[0],
    }


def alone(num_stages: int, frozen: int) -> dict[str, Any]:
    model = model_of(num_stages + 2)
    for layer in model[:frozen]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses, evaluated = [], []
    for length in (3, 5, 3):
        losses.append(loss := criterion(model(batch_of(length)["input"]), batch_of(length)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            evaluated.append(model(batch_of(4)["input"]))
    return {"losses": losses, "evaluated": evaluated, "state": model.state_dict()}


@pytest.mark.parametrize(
    ("style", "size", "frozen", "caches"),
    [
        ("1f1b", 2, 0, True),
        ("1f1b", 3, 3, False),
        ("interleaved", 2, 0, True),
        ("zbv", 2, 2, True),
        ("zbv", 4, 0, False),
    ],
)
def test_steps_of_other_lengths_and_evaluations(style, size, frozen, caches) -> None:
    placement = StagePlacement(size, 1 if style == "1f1b" else 2)
    expected = alone(placement.num_stages, frozen)
    for found in run_processes(train, size, style, size, frozen, caches):
        torch.testing.assert_close(found["losses"], [loss.detach() for loss in expected["losses"]], rtol=1e-9, atol=0)
        for name, value in found["state"].items():
            torch.testing.assert_close(value, expected["state"][name], rtol=1e-8, atol=1e-12)
        for each, outputs in zip(found["evaluated"], expected["evaluated"], strict=True):
            torch.testing.assert_close(each["loss"], criterion(outputs, batch_of(4)), rtol=1e-9, atol=0)
            if each["outputs"] is not None:
                torch.testing.assert_close(each["outputs"], outputs, rtol=1e-9, atol=1e-12)
        assert found["silent"] == {"loss": None, "outputs": None}
        kinds = 3 if style == "zbv" else 2
        assert len(found["timeline"].passes) == placement.num_stages * 4 * kinds
        assert 0 < found["timeline"].bubble < 1
        assert {each.rank for each in found["timeline"].passes} == set(range(size))


def keeps() -> list[Any]:
    with ParallelMesh(pp=2) as mesh:
        run, _, optimizer = pipeline(mesh, "1f1b")
        done = run(iter([batch_of(3)]), criterion, optimizer, return_outputs=True)
        under_way = [len(link._pending_sends) for link in run._links.values()]
    return [done["loss"], done["outputs"] is None, under_way]


def test_the_loss_is_on_every_rank_and_outputs_on_the_last() -> None:
    first, last = run_processes(keeps, 2)
    assert first[0] == last[0]
    assert first[0].dtype == last[0].dtype == torch.float64
    assert (first[1], last[1]) == (True, False)
    assert first[2] == last[2] == [0]  # all that was sent has left


def share() -> list[float]:
    """Both stages have a weight in common, with values of their own at first."""
    with ParallelMesh(pp=2) as mesh:
        rank, linear = mesh.rank("pp"), nn.Linear(1, 1, bias=False)
        stage = Stage.of_sequential(nn.Sequential(linear, linear), [range(1), range(1, 2)], rank)
        nn.init.constant_(linear.weight, 5.0 + rank)
        broadcast_tied_parameters([stage], StagePlacement(2), mesh)
    return linear.weight.flatten().tolist()


def test_shared_values_are_those_of_the_first_rank() -> None:
    assert run_processes(share, 2) == [[5.0], [5.0]]


# ------------------------------------------------------------------------------------------ what goes wrong


def meet(problem: str) -> str:
    """One rank, or all of them, meet a problem; all of them must raise."""
    with ParallelMesh(pp=2) as mesh:
        run, _, optimizer = pipeline(mesh, "1f1b")
        is_second = mesh.rank("pp") == 1
        batch = batch_of(3)
        batches = [batch]
        if problem == "length":
            batches = [batch_of(5 if is_second else 3)]
        if problem == "end":
            batches = [] if is_second else batches
        if problem == "divide":
            batches = [{key: value[:7] for key, value in batch.items()}]
        try:
            run(iter(batches), criterion, optimizer)
        except (ConfigError, ShapeError, StopIteration) as error:
            left = run(iter([batch]), criterion, optimizer)["loss"]
            return f"{type(error).__name__}: {error} {left:.3f}"
    return "nothing"


@pytest.mark.parametrize(
    ("problem", "first", "second"),
    [
        ("length", r"ranks \[1\] of the pp axis have a batch of other shapes than rank 0", r"ranks \[0\]"),
        ("end", r"ranks \[1\] of the pp axis", "StopIteration"),
        ("divide", "Found 7 samples and microbatch_size=2", "Found 7 samples and microbatch_size=2"),
    ],
)
def test_all_ranks_find_a_problem_of_one_and_go_on(problem, first, second) -> None:
    found = run_processes(meet, 2, problem)
    for text, pattern in zip(found, (first, second), strict=True):
        assert re.search(pattern, text), text
    assert found[0].split()[-1] == found[1].split()[-1]


def shapes_that_change() -> str:
    class Pack(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, : int(x[0, 0, 0])]

    with ParallelMesh(pp=2) as mesh:
        model = nn.Sequential(Pack(), nn.Linear(WIDTH, 1))
        stage = Stage.of_sequential(model, [range(1), range(1, 2)], mesh.rank("pp"))
        run = PipelineExecutor([stage], StagePlacement(2), mesh, "1f1b", Microbatching(2))
        x = torch.ones(2, 4, WIDTH)
        x[1] = 3
        run(iter([x]), lambda outputs, _: outputs.mean())
    return ""


def test_micro_batches_of_other_shapes() -> None:
    with pytest.raises(WorldError, match=r"All micro-batches leave a stage in the same shape\. Found .*\(1, 3, 8\)"):
        run_processes(shapes_that_change, 2)


def test_a_criterion_that_returns_no_number() -> None:
    with fake_world(1), ParallelMesh(pp=1) as mesh:
        run, _, optimizer = pipeline(mesh, "1f1b")
        with pytest.raises(ConfigError, match=r"returns its loss, one number in a tensor\. Found \(2, 3\)"):
            run(iter([batch_of(3)]), lambda outputs, _: outputs, optimizer)


def leave() -> None:
    with ParallelMesh(pp=2) as mesh:
        run, _, optimizer = pipeline(mesh, "1f1b")
        if mesh.rank("pp") == 1:
            raise KeyError("gone")
        run(iter([batch_of(3)]), criterion, optimizer)


def test_a_peer_that_is_lost_is_an_error() -> None:
    with pytest.raises(WorldError, match="Rank 0: (?s:.*)rank 1 has left"):
        run_processes(leave, 2)


def stop_at(stage: Stage, number: int) -> Any:
    """Raise in the forward pass of a micro-batch, as a full memory does; returns what ends that."""
    passes = iter(range(100))

    def count(*_: object) -> None:
        if next(passes) == number:
            raise torch.OutOfMemoryError("no room")

    return stage.register_forward_pre_hook(count)


def go_on(numbers: tuple[int | None, int | None], trains: bool) -> list[str]:
    """Catch what ends a step on each rank, at another micro-batch, and try two more."""
    mesh = ParallelMesh(pp=2)
    run, (stage,), optimizer = pipeline(mesh, "1f1b")
    number = numbers[mesh.rank("pp")]
    hook = None if number is None else stop_at(stage, number)
    found = []
    for _ in range(3):
        try:
            run(iter([batch_of(3)]), criterion, optimizer if trains else None, return_loss=False)
            found.append("")
        except (torch.OutOfMemoryError, CommunicationError) as error:
            found.append(str(error))
        if hook is not None:
            hook.remove()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("numbers", [(1, 0), (2, 1)], ids=str)
def test_a_step_after_one_that_did_not_end_is_refused(numbers) -> None:
    """Stages would take the messages of the last step for those of the next: a loss that no batch has."""
    for first, *more in run_processes(go_on, 2, numbers, trains=True):
        assert first == "no room"
        assert all("the last step of this rank ended by OutOfMemoryError. Start again" in each for each in more)


def test_ranks_whose_step_ended_refuse_the_next_one_too() -> None:
    (first, *_), (own, *more) = found = run_processes(go_on, 2, (None, 3), trains=False)
    assert (first, own) == ("", "no room")
    assert all("the last step of ranks [1] of the pp axis ended by an exception" in each for each in found[0][1:])
    assert all("the last step of this rank ended by OutOfMemoryError" in each for each in more)


def test_structures_are_copied_and_tensors_are_not() -> None:
    model = model_of(3)
    other = copy_structure(model)
    assert other[0] is not model[0]
    assert all(a is b for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert copy.deepcopy(model)[0].linear.weight is not model[0].linear.weight
