"""Stages with running means train in replicas of a pipeline: each micro-batch is normalized by its own means."""

from typing import Any

import torch
from equality import assert_equal
from torch import nn

from colossal._src.cluster import set_current_config
from colossal.legacy import initialize
from colossal.legacy.context import ParallelMode, global_context
from colossal.testing import run_processes

WIDTH, MICRO, STEPS = 4, 3, 2
CONFIG = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4}


def stage(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).double()


def batch_of(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, y = torch.randn(2, 4 * MICRO, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def train(config: dict[str, Any]) -> tuple[int, int, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The stage and the replica of this rank, its losses, and the state of its stage."""
    try:
        global_context.load_config(config)
        global_context.init_parallel_groups()
        own, replica = (global_context.get_local_rank(mode) for mode in (ParallelMode.PIPELINE, ParallelMode.DATA))
        model, losses = stage(own), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = initialize(model, optimizer, nn.MSELoss(), verbose=False)
        for step in range(STEPS):
            engine.zero_grad()
            _, _, loss = engine.execute_schedule(iter([batch_of(step, replica)]), return_output_label=False)
            assert loss is not None
            losses.append(loss)
            engine.step()
        return own, replica, losses, {name: value.clone() for name, value in model.state_dict().items()}
    finally:
        set_current_config(None)


def train_alone() -> tuple[list[torch.Tensor], dict[int, dict[str, torch.Tensor]]]:
    """One process: the losses of both replicas, and for each of these the state of both stages."""
    model, losses = nn.Sequential(stage(0), stage(1)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = {replica: {name: value.clone() for name, value in model.named_buffers()} for replica in range(2)}
    for step in range(STEPS):
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        for replica, buffers in own.items():
            for name, buffer in model.named_buffers():
                buffer.data = buffers[name]
            x, y = batch_of(step, replica)
            for micro in zip(x.split(MICRO), y.split(MICRO), strict=True):
                parts.append(nn.functional.mse_loss(model(micro[0]), micro[1]))
                (parts[-1] / 8).backward()
        optimizer.step()
        losses += [torch.stack(parts[:4]).mean().detach(), torch.stack(parts[4:]).mean().detach()]
    return losses, {replica: {**dict(model.named_parameters()), **buffers} for replica, buffers in own.items()}


def test_replicas_of_a_pipeline_normalize_by_their_own_means() -> None:
    losses, states = train_alone()
    for own, replica, found, state in run_processes(train, 4, CONFIG):
        for step in range(STEPS):
            assert_equal(found[step], losses[2 * step + replica], f"loss of step {step}")
        for name, value in state.items():
            assert_equal(value.double(), states[replica][f"{own}.{name}"].detach().double(), f"{own}.{name}")
        assert int(state["1.num_batches_tracked"]) == 4 * STEPS
