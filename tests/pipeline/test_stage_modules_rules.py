# pyright: reportArgumentType=false
"""Checkpoints of stages that the user built, and what is rejected on all ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colossal.errors import ConfigError, UnsupportedError
from colossal.pipeline import StageModules
from colossal.testing import WorldError, run_processes

pytestmark = pytest.mark.slow

WIDTH = 4


class Carrying(nn.Module):
    """Hands two values on, which the next stage gets as two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        out = self.linear(x)
        return (out, out.detach().abs() + 1) if scale is None else out * scale


def loss_of(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def boosted(*, seed: int, tied: Any = None, **options: Any) -> tuple[Booster, Any, Any]:
    options = {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "precision": "fp32"} | options
    plugin = HybridParallelPlugin(**options)
    torch.manual_seed(seed + plugin.mesh.rank("pp"))
    stage = Carrying()
    optimizer, booster = torch.optim.AdamW(stage.parameters(), lr=0.1), Booster("cpu", plugin=plugin)
    model = StageModules(stage, tied=tied(stage, plugin.mesh.rank("pp")) if tied else None)
    return booster, *booster.boost(model, optimizer)[:2]


def step(booster: Booster, model: Any, optimizer: Any) -> float:
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    loss = booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)["loss"]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save_and_go_on(folder: str, seeds: tuple[int, int]) -> tuple[float, float]:
    booster, model, optimizer = boosted(seed=seeds[0])
    step(booster, model, optimizer)
    booster.save_model(model, f"{folder}/model", shard=True, use_safetensors=True)
    booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
    other, again, its_optimizer = boosted(seed=seeds[1])
    other.load_model(again, f"{folder}/model")
    other.load_optimizer(its_optimizer, f"{folder}/optimizer")
    step(booster, model, optimizer)
    step(other, again, its_optimizer)
    return step(booster, model, optimizer), step(other, again, its_optimizer)


def test_a_checkpoint_has_the_names_of_a_sequence_of_all_stages(tmp_path: Path) -> None:
    for expected, found in run_processes(save_and_go_on, 2, str(tmp_path), (0, 40)):
        assert found == expected
    model = nn.Sequential(Carrying(), Carrying())
    before = [parameter.clone() for parameter in model.parameters()]
    booster = Booster("cpu")
    wrapped, *_ = booster.boost(model)
    booster.load_model(wrapped, str(tmp_path / "model"))
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def rejection_of(case: str) -> str:
    cases: dict[str, dict[str, Any]] = {
        "one_stage": {"pp_size": 1},
        "chunks": {"pp_style": "interleaved", "num_model_chunks": 2},
        "layers": {"num_layers_per_stage": [1, 1]},
        "one_rank": {"tied": lambda stage, rank: {"w": stage} if rank == 0 else {}},
        "kinds": {"tied": lambda stage, rank: {"w": stage.requires_grad_(rank == 0)}},
    }
    with pytest.raises((ConfigError, UnsupportedError)) as caught:
        boosted(seed=0, **cases[case])
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("one_stage", "Found pp_size"),
        ("chunks", r"Found modules for \[1, 1\] stages on its 2 ranks"),
        ("layers", "Found num_layers_per_stage"),
        ("one_rank", "What is tied is on several ranks"),
        ("kinds", r"'w/0' \{0: .*trained.*1: .*frozen"),
    ],
)
def test_what_does_not_fit_is_rejected_on_all_ranks(case: str, message: str) -> None:
    for rank in run_processes(rejection_of, 2, case):
        assert re.search(message, rank)


def differ_over_dp(plain: bool) -> None:
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")
    stage = nn.Linear(WIDTH, WIDTH + plugin.mesh.rank("dp") * plugin.mesh.rank("pp"))
    model = stage if plain and plugin.mesh.global_rank == 0 else StageModules(stage)
    Booster("cpu", plugin=plugin).boost(model)


def test_replicas_of_a_stage_have_the_same_modules() -> None:
    with pytest.raises(WorldError, match=r"differ in parameter chunks\.0\.weight \(\[4, 4\]"):
        run_processes(differ_over_dp, 4, plain=False)
    with pytest.raises(WorldError, match="the kind of model"):
        run_processes(differ_over_dp, 4, plain=True)


def call_under_ddp() -> None:
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    model, *_ = booster.boost(StageModules(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedError, match="Use that plugin with pp_size=2"):
        model(torch.ones(1, 2))


def test_no_other_plugin_calls_a_stage_as_a_model() -> None:
    run_processes(call_under_ddp, 1)


def test_one_rank_ties_one_object() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Within a rank, assign"):
        StageModules([first, last], tied={"w": [first.weight, last.weight]})
    with pytest.raises(ConfigError, match="no module has w/0"):
        StageModules(first, tied={"w": last.weight})
    with pytest.raises(ConfigError, match="Pass a module"):
        StageModules([])
