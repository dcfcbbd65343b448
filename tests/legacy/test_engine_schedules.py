"""Schedules of an engine: those of the program's own, batches of pipelines, and what they cannot run."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_models import BATCH, make_engine, wholes_of
from equality import assert_equal
from torch import nn

from colossal._src.cluster import set_current_config
from colossal.errors import ConfigError
from colossal.legacy import initialize
from colossal.legacy.context import global_context
from colossal.legacy.engine import (
    BaseSchedule,
    Engine,
    InterleavedPipelineSchedule,
    NonPipelineSchedule,
    PipelineSchedule,
)
from colossal.testing import fake_world, run_processes

PIPELINE = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}


@pytest.fixture(autouse=True)
def without_config() -> Iterator[None]:
    yield
    set_current_config(None)


def keyword_stages() -> list[float]:
    """A batch that is a mapping: all stages get its keywords; and one that the program splits itself."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            nn.init.eye_(self.layer.weight)
            nn.init.zeros_(self.layer.bias)

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + shift

    try:
        global_context.load_config(PIPELINE)
        global_context.init_parallel_groups()
        is_first = global_context.is_pipeline_first_stage()
        model = Stage()
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.L1Loss(), verbose=False)
        ones = torch.ones(4, 2)

        def split(stage_output: Any, batch: Any) -> tuple[Any, Any]:
            x, shift, label = batch
            return {"x": x if stage_output is None else stage_output, "shift": shift}, label

        engine.schedule = PipelineSchedule(2, split)
        output, label, loss = engine.execute_schedule(iter([(ones, ones, 5 * ones)]), forward_only=True)
        assert (output is None) == (label is None) == is_first
        assert loss is not None
        found = [loss.item()]
        # of a mapping, each stage gets the output of the one before it, and the keywords
        engine.schedule = PipelineSchedule(2, lambda batch: (batch[:2] if is_first else {"shift": batch[1]}, batch[2]))
        _, _, loss = engine.execute_schedule(iter([(ones, ones, 7 * ones)]), return_output_label=False)
        assert loss is not None
        return [*found, loss.item()]
    finally:
        set_current_config(None)


def test_stages_get_what_the_schedule_makes_of_a_batch() -> None:
    assert run_processes(keyword_stages, 2) == [[2.0, 4.0]] * 2


def test_a_schedule_of_the_programs_own_replaces_that_of_the_config() -> None:
    class Older(BaseSchedule):
        def forward_back_step(self, engine: Engine, data_iter: Iterator[Any], *_options: Any) -> Any:
            x, y = self.load_batch(data_iter)
            loss = 2 * engine.criterion(engine(x), y)
            engine.backward(loss)
            return None, None, loss

    with fake_world(1):
        engine = make_engine({})
    x = torch.ones(BATCH, 8, dtype=torch.float64)
    _, _, loss = engine.execute_schedule(iter([(x, x)]))
    first = wholes_of(engine.model, gradients=True)
    engine.zero_grad()
    engine.schedule = Older()
    assert not engine.uses_pipeline
    _, _, doubled = engine.execute_schedule(iter([(x, x)]))
    assert loss is not None
    assert doubled == 2 * loss
    for name, grad in wholes_of(engine.model, gradients=True).items():
        assert_equal(grad, 2 * first[name], name)
    with pytest.raises(NotImplementedError, match="BaseSchedule overrides forward_backward_step"):
        BaseSchedule().forward_backward_step(engine, iter([]))


def test_schedules_reject_what_they_cannot_run() -> None:
    with fake_world(1):
        engine = make_engine({})
    with pytest.raises(ConfigError, match="Found 2 and 1 in the schedule, and None and 1 in the config"):
        engine.schedule = PipelineSchedule(2)
    with pytest.raises(ConfigError, match="at least one micro-batch"):
        PipelineSchedule(0)
    with pytest.raises(ConfigError, match="one chunk"):
        InterleavedPipelineSchedule(2, 0)
    with pytest.raises(ConfigError, match="A backward pass needs the loss"):
        engine.execute_schedule(iter([]), return_loss=False)
    with pytest.raises(ConfigError, match="A batch is data and label"):
        engine.execute_schedule(iter([torch.ones(2)]))
    with pytest.raises(ConfigError, match="Found None. Pass iter"):
        NonPipelineSchedule().load_batch(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="subclass of BaseSchedule"):
        engine.schedule = "1f1b"  # type: ignore[assignment]
    with pytest.raises(StopIteration):
        engine.execute_schedule(iter([]))
