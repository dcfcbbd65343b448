# pyright: reportCallIssue=false, reportReturnType=false
"""Mixed precision by apex, against a stand-in that does what apex's documentation says."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from colossal._src.amp import DynamicScaler, NoScaler, ScalerConfig
from colossal.booster import Booster
from colossal.booster.mixed_precision import FP16ApexMixedPrecision
from colossal.booster.plugin import TorchDDPPlugin
from colossal.errors import ConfigError, UnsupportedError
from colossal.interface import ModelWrapper, OptimizerWrapper
from colossal.testing import assert_same_on_all_ranks, run_processes

STAND_IN = str(Path(__file__).parent / "stand_in")


@pytest.fixture
def amp(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(STAND_IN)
    yield __import__("apex.amp").amp
    for name in ("apex", "apex.amp"):
        del sys.modules[name]


def boost(plugin: TorchDDPPlugin | None = None, **options: Any) -> tuple[Booster, ModelWrapper, OptimizerWrapper]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}], lr=0.1
    )
    precision = FP16ApexMixedPrecision(**options)
    booster = Booster(device="cpu", plugin=plugin, mixed_precision=precision)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def inputs(rows: int = 8) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 4).view(rows, 4)


def step(booster: Booster, model: ModelWrapper, optimizer: OptimizerWrapper, factor: float = 1.0) -> float:
    loss = ((model(inputs()).float() - 1) ** 2).mean() * factor
    booster.backward(loss, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_without_apex_the_nearest_is_named() -> None:
    for make in (FP16ApexMixedPrecision, lambda: Booster(device="cpu", mixed_precision="fp16_apex")):
        with pytest.raises(UnsupportedError, match="needs NVIDIA's apex.*mixed_precision='fp16'"):
            make()


@pytest.mark.usefixtures("amp")
def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Found num_losses=2"):
        FP16ApexMixedPrecision(num_losses=2)
    with pytest.raises(ConfigError, match="Found opt_level='O9'"):
        FP16ApexMixedPrecision(opt_level="O9")
    _, _, optimizer = boost()
    with pytest.raises(UnsupportedError, match="Found a closure"):
        optimizer.step(lambda: 0.0)


def test_every_option_reaches_apex(amp) -> None:
    options = {
        "opt_level": "O2",
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": 128.0,
        "cast_model_outputs": torch.float32,
        "num_losses": 1,
        "verbosity": 0,
        "min_loss_scale": 2.0,
        "max_loss_scale": 1024.0,
    }
    _, _, optimizer = boost(**options)
    assert amp.calls[-1] == options
    assert optimizer.scaler.scale_value == 128.0
    boost()
    defaults = dict.fromkeys(options) | {"opt_level": "O1", "num_losses": 1, "verbosity": 1, "max_loss_scale": 2.0**24}
    assert amp.calls[-1] == defaults


@pytest.mark.usefixtures("amp")
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_every_level_trains_like_float32(level) -> None:
    booster, model, optimizer = boost(opt_level=level, loss_scale=128.0)
    losses = [step(booster, model, optimizer) for _ in range(20)]
    twin = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    torch.manual_seed(0)
    for layer in (twin[0], twin[2]):
        layer.reset_parameters()
    other = torch.optim.SGD([{"params": twin[0].parameters()}, {"params": twin[2].parameters(), "lr": 0.05}], lr=0.1)
    expected = []
    for _ in range(20):
        loss = ((twin(inputs()) - 1) ** 2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        other.step()
        other.zero_grad()
        expected.append(loss.item())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-3, atol=2e-3)
    assert expected[-1] < expected[0] / 2


@pytest.mark.usefixtures("amp")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_drops_one_step_and_halves_the_scale(level) -> None:
    booster, model, optimizer = boost(opt_level=level)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.unwrap(), 1, gamma=0.5)
    seen = []
    for factor in (torch.inf, 1.0, torch.inf, 1.0, 1.0, 1.0, 1.0):
        before = [parameter.detach().clone() for parameter in optimizer.parameters]
        step(booster, model, optimizer, factor * 0.01)
        schedule.step()
        moved = any(not torch.equal(*pair) for pair in zip(before, optimizer.parameters, strict=True))
        assert moved != optimizer.scaler.skipped
        seen.append((optimizer.scaler.skipped, optimizer.scaler.scale_value / 2**14))
    assert seen == [(True, 2), (False, 2), (True, 1), (False, 1), (False, 1), (False, 1), (False, 2)]


@pytest.mark.usefixtures("amp")
def test_an_overflow_that_is_thrown_away_does_not_cost_the_next_step() -> None:
    booster, model, optimizer = boost()
    booster.backward(model(inputs()).mean() * torch.inf, optimizer)
    optimizer.zero_grad()
    before = model.unwrap()[0].weight.detach().clone()
    step(booster, model, optimizer)
    assert not optimizer.scaler.skipped
    assert not torch.equal(model.unwrap()[0].weight, before)


@pytest.mark.usefixtures("amp")
def test_masters_carry_the_names_of_their_parameters() -> None:
    _, model, optimizer = boost(opt_level="O2")
    assert model.unwrap()[0].weight.dtype == torch.float16
    assert {parameter.dtype for parameter in optimizer.parameters} == {torch.float32}
    names = [optimizer.param_names[parameter] for parameter in optimizer.parameters]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.usefixtures("amp")
def test_a_model_alone_and_a_state() -> None:
    model, *rest = Booster(device="cpu", mixed_precision="fp16_apex").boost(nn.Linear(4, 1))
    assert rest == [None] * 4
    assert model(inputs()).dtype == torch.float16
    _, _, optimizer = boost()
    assert optimizer.scale_loss(torch.ones(()).half()).item() == 2.0**16
    other = DynamicScaler(ScalerConfig(64.0), "cpu")
    optimizer.scaler.load_state_dict(NoScaler().state_dict())
    assert optimizer.scaler.scale_value == 2.0**16
    optimizer.scaler.load_state_dict(other.state_dict())
    assert optimizer.scaler.scale_value == 64.0
    optimizer.scaler.load_state_dict({"scale": 32.0, "_growth_tracker": 3})
    other.load_state_dict(optimizer.scaler.state_dict())
    assert (other.scale_value, other.state_dict()["_growth_tracker"]) == (32.0, 3)


def begin_apart() -> torch.Tensor:
    sys.path.insert(0, STAND_IN)
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 1)
    booster = Booster(device="cpu", plugin=TorchDDPPlugin(), mixed_precision=FP16ApexMixedPrecision(opt_level="O2"))
    _, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in [*model.parameters(), *optimizer.parameters]:
        assert_same_on_all_ranks(parameter.detach())
    return optimizer.parameters[0].detach()


def test_all_ranks_begin_with_the_masters_of_the_first() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(4, 1).weight.detach()
    for masters in run_processes(begin_apart, 2):
        assert torch.equal(masters, expected)


def accumulate(parallel: bool, level: str) -> list[torch.Tensor]:
    sys.path.insert(0, STAND_IN)
    booster, model, optimizer = boost(TorchDDPPlugin() if parallel else None, opt_level=level)
    rank, size = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
    rows = inputs(16)
    for micro in (rows[:8], rows[8:]):
        own = micro[rank * 8 // size : (rank + 1) * 8 // size]
        with booster.no_sync(model):
            booster.backward((model(own).float() ** 2).mean() / 2, optimizer)
    grads = [parameter.grad.clone() for parameter in optimizer.parameters]
    optimizer.step()
    result = [*grads, *(parameter.detach() for parameter in model.parameters())]
    if parallel:
        for tensor in result:
            assert_same_on_all_ranks(tensor)
    return result


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_of_several_ranks_add_up_where_apex_unscales_each_of_them(level) -> None:
    (expected,) = run_processes(accumulate, 1, parallel=False, level=level)
    for rank in run_processes(accumulate, 2, parallel=True, level=level):
        for own, other in zip(rank, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=2e-3, atol=2e-3)
