"""Forward methods of users' models, which a pipeline runs on every stage: right, or refused."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal._src.pipeline.stage import Stage
from colossal.errors import PlanError
from colossal.tensor import Stages

WIDTH, LAYERS = 4, 4
Blocks = Callable[..., torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        return x + torch.tanh(self.linear(x if more is None else x + more))


class Model(nn.Module):
    """A model whose blocks run in a way of the user's own."""

    def __init__(self, run: Blocks) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(7, WIDTH), nn.ModuleList(Block() for _ in range(LAYERS))
        self.head, self.run = nn.Linear(WIDTH, 7), run

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self, self.table(ids)))


def in_order(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def by_keyword(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x=x)
    return x


def twice_each(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(block(x))
    return x


def recomputed(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def skip_over_a_stage(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks[:2]:
        x = block(x)
    middle = x  # what the first stage sends
    for block in model.blocks[2:]:
        x = block(x)
    return x + middle


def scaled_between(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = 0.9 * block(x)
    return x


def skip_from_inputs(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x + in_order(model, x)


def mean_of_all(model: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x := block(x) for block in model.blocks]).mean(0)


def inputs_for_each(model: Model, x: torch.Tensor) -> torch.Tensor:
    first = x
    for block in model.blocks:
        x = block(x, first)
    return x


def all_twice(model: Model, x: torch.Tensor) -> torch.Tensor:
    return in_order(model, in_order(model, x))


def backwards(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in reversed(model.blocks):
        x = block(x)
    return x


def recomputed_together(model: Model, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: in_order(model, x), x, use_reentrant=False)


def recomputed_by_reentrant_checkpoints(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def in_place(model: Model, x: torch.Tensor) -> torch.Tensor:
    return in_order(model, x.mul_(2))


def joined(model: Model, x: torch.Tensor) -> torch.Tensor:
    return in_order(model, torch.cat([x.new_ones(3, 1, WIDTH), x.view(3, 5, WIDTH)], 1))


def before_and_after(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(x.view(3, 5, WIDTH) * math.sqrt(WIDTH)) + torch.arange(WIDTH, device=x.device)
    return in_order(model, x) / 2


RIGHT = (in_order, by_keyword, twice_each, recomputed, skip_over_a_stage, before_and_after)
REFUSED = {
    scaled_between: r"Found that blocks\[2\], the first of its stage, takes something else",
    skip_from_inputs: "also depends on what table returns",
    mean_of_all: r"also depends on what blocks\[0\] returns",
    inputs_for_each: "also depends on what table returns",
    all_twice: r"Found that blocks\[0\], of an earlier stage, is called after layers of this one",
    backwards: r"Found that blocks\[2\], the first of its stage, takes something else",
    recomputed_together: "Found that blocks.*no checkpointed function around several layers",
    recomputed_by_reentrant_checkpoints: "and checkpoint single ones with use_reentrant=False",
    in_place: "Found that it fails with these: RuntimeError: .*modified inplace.*Make one module of all",
    joined: "Found that it fails with these: RuntimeError: .*Make one module of all",
}


def train(model: Model, ids: torch.Tensor, num_passes: int, layer_outputs: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run several passes before their backward passes, as schedules do, on the two stages of a model."""
    plan = Stages("blocks", pre_layers=("table",), layer_outputs=layer_outputs)
    stages = [Stage.of_model(copy.deepcopy(model), plan, [range(2), range(2, 4)], index) for index in range(2)]
    sent = [stages[0](None, (ids,)) for _ in range(num_passes)]
    sent = [each if isinstance(each, tuple) else (each,) for each in sent]
    received = [tuple(value.detach().requires_grad_() for value in each) for each in sent]
    outputs = [stages[1](each, (ids,)) for each in received]
    for output, arrived, left in zip(outputs, received, sent, strict=True):
        output.square().mean().backward()
        torch.autograd.backward(left, [value.grad for value in arrived])
    grads = {name: each.grad for stage in stages for name, each in stage.module.named_parameters()}
    return {"output": outputs[-1].detach(), **grads}


def make(run: Blocks) -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model(run).double(), torch.arange(15).view(3, 5) % 7


@pytest.mark.parametrize("run", RIGHT)
def test_what_a_forward_method_may_do(run: Blocks) -> None:
    model, ids = make(run)
    found = train(model, ids, num_passes=2)
    for _ in range(2):
        (output := model(ids)).square().mean().backward()
    torch.testing.assert_close(found.pop("output"), output)
    torch.testing.assert_close(found, {name: each.grad for name, each in model.named_parameters()})


@pytest.mark.parametrize("run", REFUSED)
def test_what_a_pipeline_cannot_run_is_refused(run: Blocks) -> None:
    model, ids = make(run)
    with pytest.raises(PlanError, match=f"A pipeline runs the forward method .*{REFUSED[run]}"):
        train(model, ids, num_passes=2)


class Handing(Block):
    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward(x, more), more


def handed_on(model: Model, x: torch.Tensor) -> torch.Tensor:
    first = x
    for block in model.blocks:
        x, first = block(x, first)
    return x + first


def test_layers_hand_on_what_later_ones_need() -> None:
    model, ids = make(handed_on)
    model.blocks = nn.ModuleList(Handing() for _ in range(LAYERS)).double()
    found = train(model, ids, num_passes=1, layer_outputs=("x", "more"))
    (output := model(ids)).square().mean().backward()
    torch.testing.assert_close(found.pop("output"), output)
    torch.testing.assert_close(found, {name: each.grad for name, each in model.named_parameters()})


def test_an_evaluation_shows_that_values_are_missing() -> None:
    model, ids = make(skip_from_inputs)
    plan = Stages("blocks", pre_layers=("table",))
    last = Stage.of_model(model, plan, [range(2), range(2, 4)], 1)
    with torch.no_grad():
        assert last(torch.zeros(3, 5, WIDTH, dtype=torch.float64), (ids,)).isnan().all()
