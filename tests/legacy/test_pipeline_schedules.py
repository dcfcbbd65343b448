"""Schedules that a program runs itself, by the older names, train as one process does."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import assert_equal
from torch import nn

from colossal.errors import ColossalError, ConfigError, UnsupportedError
from colossal.interface import OptimizerWrapper
from colossal.legacy.cluster import ProcessGroupMesh
from colossal.legacy.pipeline import (
    GridStageManager,
    InterleavedSchedule,
    OneForwardOneBackwardSchedule,
    PipelineGraph,
    PipelineP2PCommunication,
    ScheduledNode,
    StageSchedule,
    ZeroBubbleVPipeScheduler,
)
from colossal.testing import fake_world, run_processes, run_threads

WIDTH, BATCH, STEPS, MICRO = 4, 8, 3, 4
STYLES = {"1f1b": {}, "interleaved": {"enable_interleave": True}, "zbv": {"enable_interleave": True, "use_zbv": True}}
STYLES["zbv by hand"] = STYLES["zbv"]


OBJECTS: list[Any] = ["text", torch.arange(3.0), [torch.tensor(True), None], {"a": (1, 2.5), "b": torch.ones(2, 0)}]


class Part(nn.Module):
    """A layer whose forward method asks which stage it is, as programs of the older API write it."""

    def __init__(self, layer: nn.Linear, manager: GridStageManager) -> None:
        super().__init__()
        self.layer, self.manager = layer, manager

    def forward(self, data: torch.Tensor, hidden: Any = None, extra: Any = None) -> Any:
        out = torch.tanh(self.layer(data if self.manager.is_first_stage() else hidden))
        assert extra == (None if self.manager.is_first_stage() else [None, "text", 2])
        return out if self.manager.is_last_stage() else {"hidden": out, "extra": [None, "text", 2]}


def layers_of(number: int) -> list[nn.Linear]:
    torch.manual_seed(11)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(number)]


def batch_of(step: int) -> list[torch.Tensor]:
    return [torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)]


def loss_of(outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    return ((outputs - batch[0]) ** 2).mean()


def schedule_of(style: str, manager: GridStageManager) -> Any:
    if style == "1f1b":
        return OneForwardOneBackwardSchedule(manager, num_microbatches=MICRO)
    if style == "interleaved":
        return InterleavedSchedule(manager, 2, microbatch_size=BATCH // MICRO)
    if style == "zbv by hand":
        passes = [(kind, chunk, i) for i in (2, 0, 3, 1) for kind, chunk in ("F0", "F1", "B1", "B0", "W1", "W0")]
        by_hand = [[ScheduledNode(kind, int(chunk), stage, i) for kind, chunk, i in passes] for stage in (0, 1)]
        return ZeroBubbleVPipeScheduler(manager, by_hand, 2, microbatch_size=BATCH // MICRO)
    nodes: Any = PipelineGraph(manager.num_stages, MICRO, 2, 1, 3, 0, 2, -1, -1).get_v_schedule()
    return ZeroBubbleVPipeScheduler(manager, nodes, 2, num_microbatch=MICRO)


def train(style: str, size: int) -> dict[str, Any]:
    chunks = 1 if style == "1f1b" else 2
    mesh = ProcessGroupMesh(1, size, 1)
    manager = GridStageManager(mesh, pipeline_axis=1, num_model_chunks=chunks, **STYLES[style])
    layers, own = layers_of(size * chunks), manager.placement.stages_of(manager.stage)
    parts = nn.ModuleList(Part(layers[stage], manager) for stage in own)
    optimizer = OptimizerWrapper(torch.optim.AdamW(parts.parameters(), lr=0.1))
    schedule, losses, grads = schedule_of(style, manager), [], {}
    model = parts if chunks > 1 else parts[0]
    for step in range(STEPS):
        found = schedule.forward_backward_step(model, iter([batch_of(step)]), loss_of, optimizer, return_loss=True)
        assert found["outputs"] is None
        losses.append(found["loss"])
        if step == 0:
            grads = {
                stage: [each.grad.clone() for each in part.parameters()] for stage, part in zip(own, parts, strict=True)
            }
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found = schedule.forward_backward_step(model, iter([batch_of(9)]), loss_of, return_outputs=True)
    assert found["loss"] is None
    assert (found["outputs"] is not None) == manager.is_last_stage(ignore_chunk=True)
    values = {stage: [*part.parameters()] for stage, part in zip(own, parts, strict=True)}
    return {"losses": losses, "grads": grads, "values": values, "outputs": found["outputs"]}


def list_as_stage() -> float | None:
    """The loss of a stage that is a list of layers with a forward method of its own."""
    manager = GridStageManager(ProcessGroupMesh(2), 0)
    layers = layers_of(4)
    stage = nn.ModuleList(layers[2 * manager.stage : 2 * manager.stage + 2])

    def forward(data: torch.Tensor, hidden: torch.Tensor | None = None) -> Any:
        out = stage[1](stage[0](data if hidden is None else hidden))
        return out if manager.is_last_stage() else {"hidden": out}

    stage.forward = forward
    schedule = OneForwardOneBackwardSchedule(manager, num_microbatches=MICRO)
    found = schedule.forward_backward_step(stage, iter([batch_of(0)]), loss_of, return_loss=True)
    return found["loss"].item()


def test_a_list_with_a_forward_method_is_one_stage() -> None:
    layers = nn.Sequential(*layers_of(4))
    expected = loss_of(layers(batch_of(0)[0]), batch_of(0)).item()
    assert run_processes(list_as_stage, 2) == [pytest.approx(expected, rel=1e-12)] * 2


def one_process(number: int) -> dict[str, Any]:
    layers = layers_of(number)
    optimizer = torch.optim.AdamW(nn.ModuleList(layers).parameters(), lr=0.1)
    losses, grads = [], {}

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = torch.tanh(layer(x))
        return x

    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(run(batch_of(step)[0]), batch_of(step))
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            grads = {index: [each.grad for each in layer.parameters()] for index, layer in enumerate(layers)}
        optimizer.step()
    values = {index: [*layer.parameters()] for index, layer in enumerate(layers)}
    return {"losses": losses, "grads": grads, "values": values, "outputs": run(batch_of(9)[0]).detach()}


@pytest.mark.parametrize(
    ("style", "size"), [("1f1b", 2), ("1f1b", 4), ("interleaved", 2), ("zbv", 2), ("zbv by hand", 2)]
)
def test_a_schedule_trains_as_one_process(style: str, size: int) -> None:
    ranks = run_processes(train, size, style, size)
    expected = one_process(size * (1 if style == "1f1b" else 2))
    for rank in ranks:
        for found, loss in zip(rank["losses"], expected["losses"], strict=True):
            assert_equal(found, loss, "loss")
        for what in ("grads", "values"):
            for stage, tensors in rank[what].items():
                for found, wanted in zip(tensors, expected[what][stage], strict=True):
                    assert_equal(found, wanted, f"{what} of stage {stage}")
    (outputs,) = [rank["outputs"] for rank in ranks if rank["outputs"] is not None]
    assert_equal(outputs, expected["outputs"], "outputs")


def test_a_stage_manager_knows_its_place() -> None:
    def program() -> Any:
        manager = GridStageManager(ProcessGroupMesh(2, 2), pipeline_axis=1)
        group = manager.init_process_group_by_stages([0, 1])
        assert manager.pg_mesh.get_ranks_in_group(group) == manager.pg_mesh.get_ranks_in_group(
            manager.get_p2p_process_group(0, 1)
        )
        ends = manager.is_first_stage(), manager.is_last_stage()
        return manager.stage, *ends, manager.get_prev_rank(), manager.get_rank(), manager.get_next_rank()

    assert run_threads(program, 4) == [
        (0, True, False, 1, 0, 1),
        (1, False, True, 0, 1, 0),
        (0, True, False, 3, 2, 3),
        (1, False, True, 2, 3, 2),
    ]


def test_a_stage_manager_knows_chunks_and_layers() -> None:
    with fake_world(2, rank=1):
        interleaved = GridStageManager(ProcessGroupMesh(2), 0, enable_interleave=True, num_model_chunks=2)
        assert interleaved.is_last_stage()
        with interleaved.switch_model_chunk_id(0):
            assert not interleaved.is_last_stage()
            assert interleaved.is_last_stage(ignore_chunk=True)
        assert interleaved.distribute_layers(10) == [2, 3, 3, 2]
        assert interleaved.get_stage_index([2, 3, 3, 2]) == [[2, 5], [8, 10]]
        assert interleaved.get_stage_index([2, 3, 3, 2], stage=0) == [[0, 2], [5, 8]]
        plain = GridStageManager(ProcessGroupMesh(2), 0, num_layers_per_stage=[1, 9])
        assert (plain.distribute_layers(10), plain.get_stage_index([1, 9])) == ([1, 9], [1, 10])
        with pytest.raises(ConfigError, match=r"\[1, 9\]"):
            plain.distribute_layers(12)
        with pytest.raises(ConfigError, match="Found chunk 2"), interleaved.switch_model_chunk_id(2):
            pass
        # a rank outside calls as well, and has no part in it
        assert plain.init_process_group_by_stages([0]) is torch.distributed.GroupMember.NON_GROUP_MEMBER
    with fake_world(2):
        folded = GridStageManager(ProcessGroupMesh(2), 0, use_zbv=True, num_model_chunks=2)
        assert folded.is_first_stage()
        assert folded.is_last_stage()
        with folded.switch_model_chunk_id(1):
            assert not folded.is_first_stage()
            assert folded.is_last_stage()


def run_in_order() -> Any:
    seen: list[str] = []
    manager = GridStageManager(ProcessGroupMesh(2), 0, use_zbv=True, num_model_chunks=2)
    layers = layers_of(4)
    parts = [Part(layers[stage], manager) for stage in manager.placement.stages_of(manager.stage)]
    for chunk, part in enumerate(parts):
        part.register_forward_pre_hook(lambda *_, chunk=chunk: seen.append(f"F{chunk}"))
        part.layer.register_full_backward_hook(lambda *_, chunk=chunk: seen.append(f"B{chunk}"))
    nodes: Any = PipelineGraph(2, MICRO, 2, 1, 3, 1, 2, -1, -1).get_v_schedule()
    nodes[0].insert(1, ScheduledNode("SEND_FORWARD", 0, 0, 0))
    optimizer = torch.optim.SGD([*parts[0].parameters(), *parts[1].parameters()])
    schedule = ZeroBubbleVPipeScheduler(manager, nodes, 2, num_microbatch=MICRO)
    schedule.forward_backward_step(
        model_chunk=parts, data_iter=iter([batch_of(0)]), criterion=loss_of, optimizer=optimizer
    )
    return seen, [f"{node.type}{node.chunk}" for node in nodes[manager.stage] if node.type in ("F", "B")]


def test_a_schedule_is_run_in_its_order() -> None:
    for seen, wanted in run_processes(run_in_order, 2):
        assert seen == wanted


def test_a_schedule_of_another_number_is_refused() -> None:
    graph: Any = PipelineGraph(2, 2, 1, 1, 1, 0, 2, -1, -1).get_v_schedule()
    with fake_world(2):
        manager = GridStageManager(ProcessGroupMesh(2), 0, use_zbv=True, num_model_chunks=2)
        with pytest.raises(ConfigError, match="one of 2, and a batch of 4"):
            ZeroBubbleVPipeScheduler(manager, graph, 2, num_microbatch=4)


def test_a_graph_says_times_and_memory() -> None:
    graph = PipelineGraph(4, 8, 1, 1, 1, 0, 2, -1, -1)
    nodes: Any = graph.get_v_schedule()
    time: Any = graph.get_v_schedule(only_run_time=True)
    assert time == max(node.completion_time for rank in nodes for node in rank)
    assert 8 * 6 <= time < 8 * 6 + 8
    assert all([node.stage for node in rank] == [stage] * 48 for stage, rank in enumerate(nodes))
    with pytest.raises(ConfigError, match="Found that this schedule takes"):
        PipelineGraph(4, 8, 1, 1, 1, 0, 2, -1, -1, max_mem=3).get_v_schedule()
    assert PipelineGraph(4, 8, 1, 1, 1, 0, 2, -1, -1, max_mem=16).get_v_schedule() == nodes
    with pytest.raises(ConfigError, match="changes of the memory"):
        PipelineGraph(4, 8, 1, 1, 1, 0, 2, -1, 0)


def wait_for(works: Any) -> None:
    for work in works:
        work.wait()


def both_ways(p2p: PipelineP2PCommunication, first: str, second: str) -> list[Any]:
    found, works = p2p.send_forward_recv_forward(first)
    other, more = p2p.send_backward_recv_backward(second)
    wait_for([*works, *more])
    return [found, other]


def exchange(overlap: bool) -> Any:
    p2p = PipelineP2PCommunication(GridStageManager(ProcessGroupMesh(2), 0), overlap_p2p=overlap)
    if p2p.stage_manager.is_first_stage():
        for each in OBJECTS:
            p2p.send_forward(each)
        back = [p2p.send_forward_recv_backward(each, send_metadata=False)[0] for each in OBJECTS]
        return [*back, *both_ways(p2p, "round", "turn")]
    there = [p2p.recv_forward()[0] for _ in OBJECTS]
    there = [p2p.send_backward_recv_forward(each)[0] for each in there]
    return [*there, *both_ways(p2p, "trip", "over")]


@pytest.mark.parametrize("overlap", [True, False])
def test_objects_go_both_ways(overlap: bool) -> None:
    first, second = run_processes(exchange, 2, overlap)
    for found in (first[: len(OBJECTS)], second[: len(OBJECTS)]):
        assert repr(found) == repr(OBJECTS)
    assert (first[len(OBJECTS) :], second[len(OBJECTS) :]) == (["trip", "over"], ["round", "turn"])


def send_around() -> Any:
    p2p = PipelineP2PCommunication(GridStageManager(ProcessGroupMesh(2, 3), 1))
    place = p2p.stage_manager.stage
    if p2p.stage_manager.get_rank() == 1:
        with pytest.raises(ConfigError, match="rank 1 to rank 4"):
            p2p.send_forward("apart", next_rank=4)
    works = [*p2p.send_forward({"of": place}), *p2p.send_backward(torch.tensor(place))]
    found = p2p.recv_forward()[0]["of"], int(p2p.recv_backward()[0])
    wait_for(works)
    return found


def test_the_last_rank_and_the_first_are_neighbours() -> None:
    assert run_processes(send_around, 6) == [(2, 1), (0, 2), (1, 0)] * 2


def send_both_kinds() -> Any:
    p2p = PipelineP2PCommunication(GridStageManager(ProcessGroupMesh(2), 0))
    if p2p.stage_manager.is_first_stage():
        wait_for(p2p.send_forward([torch.ones(1, requires_grad=True) * 2, torch.ones(1)]))
        with pytest.raises(UnsupportedError, match="Found object"):
            p2p.send_forward(object())
        return None
    return [each.requires_grad for each in p2p.recv_forward()[0]]


def test_gradients_are_asked_of_what_required_them() -> None:
    assert run_processes(send_both_kinds, 2)[1] == [True, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda one, _: OneForwardOneBackwardSchedule(one), "num_microbatches=None, microbatch_size=None"),
        (lambda one, _: OneForwardOneBackwardSchedule(one, 2, fp8_communication=True), "fp8_communication=True"),
        (lambda one, _: InterleavedSchedule(one, 2, 2), "num_model_chunks=2, and 1 chunks"),
        (lambda one, _: InterleavedSchedule(one, 1, 2, overlap_p2p=False), "overlap_p2p=False"),
        (lambda one, _: ZeroBubbleVPipeScheduler(one, [], 2, 2), "use_zbv=False"),
        (lambda _, two: OneForwardOneBackwardSchedule(two, 2), "num_model_chunks=2"),
        (lambda _, two: ZeroBubbleVPipeScheduler(two, [[]], 2, 2), "Found 1 lists"),
        (lambda _, two: GridStageManager(two.pg_mesh, 0, num_model_chunks=2), "num_model_chunks=2"),
        (
            lambda one, _: OneForwardOneBackwardSchedule(one, 2).forward_backward_step(
                [nn.Linear(1, 1)] * 2, iter([]), loss_of
            ),
            "Found 2 modules",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[Any, Any], object], message: str) -> None:
    with fake_world(2):
        one = GridStageManager(ProcessGroupMesh(2), 0)
        two = GridStageManager(one.pg_mesh, 0, use_zbv=True, num_model_chunks=2)
        with pytest.raises(ColossalError, match=message):
            make(one, two)


def test_a_stage_returns_keywords() -> None:
    def program() -> None:
        schedule = OneForwardOneBackwardSchedule(GridStageManager(ProcessGroupMesh(1), 0), num_microbatches=2)
        parts = [nn.Linear(WIDTH, WIDTH).double()]
        schedule.forward_backward_step(parts[0], iter([{"input": batch_of(0)[0]}]), lambda out, _: out.sum())
        two = GridStageManager(schedule.stage_manager.pg_mesh, 0, enable_interleave=True, num_model_chunks=2)
        with pytest.raises(ConfigError, match="Linear returns Tensor"):
            InterleavedSchedule(two, 2, 2).forward_backward_step(parts * 2, iter([batch_of(0)]), loss_of)

    run_threads(program, 1)


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("p2p", "PipelineP2PCommunication", PipelineP2PCommunication),
        ("schedule.base", "PipelineSchedule", StageSchedule),
    ],
)
def test_the_documented_modules_have_these_names(module: str, name: str, ours: type) -> None:
    assert getattr(importlib.import_module(f"colossal.pipeline.{module}"), name) is ours
