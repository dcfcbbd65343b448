"""A model of four blocks, in any mode of tensor parallelism and in stages, and what one process makes of it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from colossal import nn as col_nn
from colossal._src.cluster import set_current_config
from colossal._src.nn.layer import ParallelLayer
from colossal.legacy import initialize
from colossal.legacy.context import ParallelMode, global_context
from colossal.legacy.engine import Engine

WIDTH, BATCH, STEPS, BLOCKS = 8, 16, 3, 4


class Block(nn.Module):
    """A layer that has the same whole weights in each mode; the first splits its input, the last joins its output."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index, self.layer = index, col_nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = col_nn.split_input(x) if self.index == 0 else x
        x = self.layer(x)
        return col_nn.gather_output(x) if self.index == BLOCKS - 1 else torch.tanh(x)


def blocks(*indices: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(*(Block(index) for index in indices)).to(dtype)


def own_part(config: Mapping[str, Any]) -> nn.Module:
    """What a program builds on this rank: the model, its stage, or the chunks of its stages."""
    dtype = torch.float32 if "fp16" in config or "zero" in config else torch.float64
    if not global_context.is_initialized(ParallelMode.PIPELINE):
        return blocks(*range(BLOCKS), dtype=dtype)
    rank = global_context.get_local_rank(ParallelMode.PIPELINE)
    if config.get("NUM_CHUNKS", 1) > 1:
        return nn.ModuleList([blocks(rank, dtype=dtype), blocks(2 + rank, dtype=dtype)])
    return blocks(2 * rank, 2 * rank + 1, dtype=dtype)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(90 + step), dtype=torch.float64)
    return x, y


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def wholes_of(model: nn.Module, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """The whole parameters, or gradients, of the blocks that this rank has."""
    found = {}
    for block in model.modules():
        if not isinstance(block, Block):
            continue
        assert isinstance(block.layer, ParallelLayer)
        for name in block.layer.layouts:
            parameter = block.layer.get_parameter(name)
            own = parameter.data
            if gradients:
                assert parameter.grad is not None
                parameter.data = parameter.grad
            found[f"{block.index}.{name}"] = block.layer.full_parameter(name).clone()
            parameter.data = own
    return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer whose update shows the scale of a gradient."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def make_engine(config: Mapping[str, Any], optimizer: Any = adam, **options: Any) -> Engine:
    """Arrange the ranks and initialize, as a launch with the config does."""
    global_context.load_config(dict(config))
    global_context.init_parallel_groups()
    engine, *_ = initialize(own_part(config), optimizer, nn.MSELoss(), verbose=False, **options)
    return engine


def train(config: Mapping[str, Any], change: Callable[[Engine], None] | None = None) -> dict[str, Any]:
    """Take steps by `execute_schedule`; return losses, the gradients of the first update, and whole parameters."""
    try:
        engine, grads, losses = make_engine(config), dict[str, torch.Tensor](), list[torch.Tensor]()
        if change is not None:
            change(engine)

        def note(*_: Any) -> None:
            if not grads and "fp16" not in config:
                grads.update(wholes_of(engine.model, gradients=True))

        engine.optimizer.unwrap().register_step_pre_hook(note)
        losses += [take_step(engine, step) for step in range(STEPS)]
        return {"losses": losses, "grads": grads, "parameters": wholes_of(engine.model)}
    finally:
        set_current_config(None)


def take_step(engine: Engine, step: int) -> torch.Tensor:
    """Accumulate this rank's share of a batch, and update."""
    size, rank = global_context.data_parallel_size, global_context.get_local_rank(ParallelMode.DATA)
    dtype = next(each.dtype for each in engine.model.parameters())
    x, y = (
        each.chunk(size)[rank].to(torch.float64 if dtype == torch.float64 else torch.float32) for each in batch_of(step)
    )
    parts, losses = engine.gradient_accumulation, []
    for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([part]), return_output_label=False)
        assert loss is not None
        losses.append(loss)
        engine.step()
    return torch.stack(losses).mean()


def train_alone(clip: float = 0.0) -> dict[str, Any]:
    """The same in one process, by nothing but torch."""
    model, criterion = blocks(*range(BLOCKS)), nn.MSELoss()
    optimizer, grads, losses = adam(model.parameters()), {}, []
    for step in range(STEPS):
        x, y = batch_of(step)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        if clip:
            assert float(nn.utils.clip_grad_norm_(model.parameters(), clip)) > clip
        grads = grads or wholes_of(model, gradients=True)
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "grads": grads, "parameters": wholes_of(model)}
