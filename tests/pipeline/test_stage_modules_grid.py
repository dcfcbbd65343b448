# pyright: reportArgumentType=false
"""Stages of tensor-parallel layers, in every arrangement of the tp axis, equal one process."""

from typing import Any

import pytest
import torch
from divided import whole_grads, whole_parameters
from equality import assert_equal
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError
from colossal.nn import LayerNorm, Linear, gather_output, split_input
from colossal.pipeline import StageModules
from colossal.testing import WorldError, run_processes

pytestmark = pytest.mark.slow

WIDTH, HIDDEN, CLASSES, BATCH, STEPS = 8, 16, 4, 8, 3

MODES: dict[str, dict[str, Any]] = {
    "1d": {"tp": 2},
    "2d": {"tp": 4, "tp_mode": "2d"},
    "2.5d": {"tp": 4, "tp_mode": "2.5d", "tp_depth": 1},
    "3d": {"tp": 8, "tp_mode": "3d"},
}


def natives(index: int) -> list[nn.Module]:
    """The layers of a stage as one process has them."""
    layers: list[nn.Module] = (
        [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)] if index == 0 else [nn.Linear(HIDDEN, CLASSES)]
    )
    draws = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.double().parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.float64))
    return layers


class Stage(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        kinds = {nn.Linear: Linear, nn.LayerNorm: LayerNorm}
        layers = [kinds[type(native)].from_native(native) for native in natives(index)]
        self.layers, self.index = nn.Sequential(*layers), index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(split_input(x) if self.index == 0 else torch.tanh(x))
        return gather_output(x) if self.index == 1 else x


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(100 + step)
    return (
        torch.randn(BATCH, WIDTH, generator=draws, dtype=torch.float64),
        torch.randn(BATCH, CLASSES, generator=draws, dtype=torch.float64),
    )


def loss_of(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (outputs - batch[1]).square().mean()


def train(mode: dict[str, Any]) -> dict[str, Any]:
    with ParallelMesh(pp=2, **mode) as mesh:
        plugin = HybridParallelPlugin(tp_size=mode["tp"], pp_size=2, precision="fp32", num_microbatches=2, max_norm=0.5)
        assert plugin.mesh is mesh
        model = StageModules(Stage(mesh.rank("pp")))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        booster = Booster("cpu", plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        found: dict[str, Any] = {"losses": [], "norms": []}
        for step in range(STEPS):
            found["losses"].append(
                booster.execute_pipeline(iter([batch_of(step)]), boosted, loss_of, optimizer)["loss"]
            )
            if step == 0:
                found["grads"] = whole_grads(stage_of(boosted), mesh)
            found["norms"].append(optimizer.get_grad_norm())
            optimizer.step()
            optimizer.zero_grad()
        found["parameters"] = whole_parameters(boosted.unwrap(), mesh)
    return found


def stage_of(boosted: Any) -> nn.Module:
    (stage,) = boosted.unwrap().stages
    return stage.module


def one_process() -> dict[str, Any]:
    model = nn.Sequential(*(nn.ModuleDict({"layers": nn.Sequential(*natives(index))}) for index in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        batch = batch_of(step)
        first, last = (stage["layers"] for stage in model)
        loss = loss_of(last(torch.tanh(first(batch[0]))), batch)
        loss.backward()
        found["losses"].append(loss.detach())
        if step == 0:
            found["grads"] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return found | {"parameters": dict(model.named_parameters())}


@pytest.mark.parametrize("mode", MODES)
def test_stages_of_layers_on_a_grid_equal_one_process(mode: str) -> None:
    ranks, expected = run_processes(train, 2 * MODES[mode]["tp"], MODES[mode]), one_process()
    seen: set[str] = set()
    for rank in ranks:
        for step in range(STEPS):
            assert_equal(rank["losses"][step], expected["losses"][step], f"loss of step {step}")
            norm = torch.as_tensor(rank["norms"][step], dtype=torch.float64)
            assert_equal(norm, expected["norms"][step], f"norm of step {step}")
        for name, value in rank["grads"].items():
            assert_equal(value, expected["grads"][name], f"gradient of {name}")
        for name, value in rank["parameters"].items():
            assert_equal(value, expected["parameters"][name].detach(), f"{name} after {STEPS} steps")
            seen.add(name)
    assert seen == expected["parameters"].keys()


def boost_unsharded() -> None:
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1 + 1, precision="fp32", num_microbatches=2)
    Booster("cpu", plugin=plugin).boost(StageModules(nn.Linear(2, 2)))


def test_stages_without_a_sharded_parameter_are_rejected_on_all_ranks() -> None:
    with pytest.raises(WorldError, match="no such parameter on any stage") as caught:
        run_processes(boost_unsharded, 4)
    assert isinstance(caught.value.__cause__, ConfigError) or "ConfigError" in str(caught.value)
