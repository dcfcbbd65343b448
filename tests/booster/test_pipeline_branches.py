# pyright: reportArgumentType=false, reportCallIssue=false
"""Stages whose forward passes depend on the data: ranks and micro-batches use different modules, or end the graph."""

from functools import partial
from typing import Any

import pytest
import torch
from equality import assert_equal
from families import build, inputs_of
from float64 import KeepFloat64
from plugins import HYBRID
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.cluster import ParallelMesh
from colossal.errors import ColossalError
from colossal.tensor import full_tensor_of
from colossal.testing import run_processes

FAMILY, STEPS, NUM_PARTS = "llama-tied", 2, 4
WORLDS: dict[str, tuple[int, dict[str, int], Any]] = {
    "pp2": (2, {"pp": 2}, partial(HYBRID, 1, 2, num_microbatches=4)),
    "pp2 x dp2": (4, {"pp": 2}, partial(HYBRID, 1, 2, num_microbatches=2)),
    "pp2 x dp2, ZeRO-1": (4, {"pp": 2}, partial(HYBRID, 1, 2, num_microbatches=2, zero_stage=1)),
    "pp2 x tp2": (4, {"pp": 2, "tp": 2}, partial(HYBRID, 2, 2, num_microbatches=4)),
}


class Branches(nn.Module):
    """One of two matrices after a module, by the values of the samples."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        values = torch.randn(2, width, width, generator=torch.Generator().manual_seed(7), dtype=torch.float64) / width
        self.first, self.second = map(nn.Parameter, values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y @ (self.first if _is_first(x) else self.second)


class EndsGraph(nn.Module):
    """A layer before which, for some samples, nothing trains."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = self.layer(x, *args, **kwargs)
        return y if _is_first(x) else y.detach()


def leave_out_on_rank_1(mlp: nn.Module) -> None:
    """Let one of the ranks with the same samples leave a module out, whose layers are sharded over tp."""
    forward = mlp.forward
    mlp.forward = lambda x: x if dist.get_rank() == 1 else forward(x)


def _is_first(x: torch.Tensor) -> bool:
    return bool(x.detach()[..., 0].sum() > 0)


def make(kind: str, layer: int) -> Any:
    model: Any = build(FAMILY)
    layers = model.model.layers
    if kind == "branches":
        layers[layer].mlp = Branches(layers[layer].mlp, model.config.hidden_size)
    elif kind == "skipped":
        leave_out_on_rank_1(layers[layer].mlp)
    else:
        layers[layer] = EndsGraph(layers[layer])
    return model


def batch() -> dict[str, torch.Tensor]:
    inputs = [inputs_of(FAMILY, num_changed=4 * number) for number in range(4)]
    return {key: torch.cat([each[key] for each in inputs]) for key in inputs[0]}


def train_alone(kind: str, layer: int) -> dict[str, torch.Tensor]:
    model = make(kind, layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        for number in range(NUM_PARTS):
            loss = model(**{key: value.chunk(NUM_PARTS)[number] for key, value in batch().items()}).loss
            if loss.requires_grad:
                (loss / NUM_PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def train(axes: dict[str, int], plugin: Any, cases: list[tuple[str, int]]) -> list[dict[str, torch.Tensor]]:
    found = []
    with ParallelMesh(**axes), KeepFloat64():
        for kind, layer in cases:
            booster, model = Booster(device="cpu", plugin=plugin()), make(kind, layer)
            boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
            rank, size = booster.plugin.data_parallel_rank_and_size()
            own = {key: value.chunk(size)[rank] for key, value in batch().items()}
            for _ in range(STEPS):
                booster.execute_pipeline(iter([own]), boosted, lambda outputs, _: outputs.loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            named = boosted.unwrap().named_parameters()  # "stages.0.module." and the name in the full model
            found.append({name.split(".module.", 1)[1]: full_tensor_of(each).detach() for name, each in named})
    return found


@pytest.mark.parametrize(
    "world", [pytest.param(each, marks=() if "," in each or "tp2" in each else pytest.mark.slow) for each in WORLDS]
)
def test_branches_by_the_data_train_as_in_one_process(world: str) -> None:
    size, axes, plugin = WORLDS[world]
    cases = [("branches", 0), ("branches", 1), ("ends", 1)]
    with KeepFloat64():
        expected = [train_alone(*case) for case in cases]
    for rank in run_processes(train, size, axes, plugin, cases):
        for case, found, wanted in zip(cases, rank, expected, strict=True):
            assert found
            for name, value in found.items():
                assert_equal(value, wanted[name], f"{world}, {case}, {name}")


def refuse(axes: dict[str, Any], plugin: Any, kind: str) -> str:
    try:
        train(axes | {"timeout_seconds": 2}, plugin, [(kind, 0)])
    except ColossalError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("world", "kind", "remedy"),
    [
        ("pp2 x tp2", "skipped", "that only some ranks call"),
        ("pp2", "ends", "by detach or torch.no_grad(), multiply what trains by 0"),
        ("pp2 x dp2", "ends", "by detach or torch.no_grad(), multiply what trains by 0"),
    ],
)
def test_branches_that_ranks_cannot_agree_on_are_refused_on_all(world: str, kind: str, remedy: str) -> None:
    size, axes, plugin = WORLDS[world]
    messages = run_processes(refuse, size, axes, plugin, kind)
    assert all(messages), messages
    assert any(remedy in message for message in messages), messages
