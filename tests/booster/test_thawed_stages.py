# pyright: reportArgumentType=false
"""Layers of a pipeline that a program freezes and thaws between steps, so that gradients go back to other stages."""

from functools import partial
from typing import Any

import pytest
import torch
from equality import assert_equal
from plugins import HYBRID
from torch import nn

from colossal.booster import Booster
from colossal.testing import run_processes

PIPELINE = partial(HYBRID, 1, num_microbatches=2)
PLUGINS: dict[str, tuple[int, Any]] = {
    "1f1b": (2, partial(PIPELINE, 2)),
    "zero1": (2, partial(PIPELINE, 2, zero_stage=1)),
    "interleaved": (2, partial(PIPELINE, 2, pp_style="interleaved", num_model_chunks=2)),
    "zbv": (2, partial(PIPELINE, 2, pp_style="zbv", num_model_chunks=2)),
    "no cache": (2, partial(PIPELINE, 2, enable_metadata_cache=False)),
    "4 stages": (4, partial(PIPELINE, 4)),
    "dp2": (4, partial(PIPELINE, 2)),
}
BATCHES = torch.randn(6, 8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
FROZEN = ((0, 1, 2), (0, 1, 2), (), (3,), (0,), (2, 3))  # before each step, of the four linear layers


def build() -> nn.Sequential:
    model = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(6, 6), nn.Tanh()))).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-0.6, 0.5, parameter.numel()).view_as(parameter).roll(number))
    return model


def train(plugin: str | None) -> dict[str, Any]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    booster = Booster(device="cpu", plugin=None if plugin is None else PLUGINS[plugin][1]())
    model, optimizer, *_ = booster.boost(model, optimizer)
    own: Any = model.unwrap()
    roots = [own] if plugin is None else own.full_spec.roots
    rank, size = booster.plugin.data_parallel_rank_and_size()
    norms = []
    for batch, frozen in zip(BATCHES, FROZEN, strict=True):
        for root in roots:
            for name, parameter in root.named_parameters():
                parameter.requires_grad_(int(name.partition(".")[0]) // 2 not in frozen)
        part = batch.chunk(size)[rank]
        booster.execute_pipeline(iter([part]), model, lambda outputs, _: outputs.square().mean(), optimizer)
        norms.append(optimizer.get_grad_norm())
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.detach().clone() for root in roots for name, value in root.state_dict().items()}
    return state | {"norms": torch.tensor(norms, dtype=torch.float64)}


GATE = ("1f1b", "zero1", "interleaved", "zbv")


@pytest.mark.parametrize(
    "plugin", [pytest.param(each, marks=() if each in GATE else pytest.mark.slow) for each in PLUGINS]
)
def test_layers_are_frozen_and_thawed_as_in_one_process(plugin: str) -> None:
    expected, found = train(None), run_processes(train, PLUGINS[plugin][0], plugin)
    assert {name for state in found for name in state} == expected.keys()
    for state in found:
        for name, value in state.items():
            assert_equal(value, expected[name], name)
