# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""The loss scale: its rule, its agreement with torch's, and what it does to gradients."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn

from colossal._src.amp import DynamicScaler, ScalerConfig
from colossal._src.tensor import set_placement
from colossal.amp.naive_amp import ConstantGradScaler, DynamicGradScaler
from colossal.errors import CheckpointError, ConfigError, UnsupportedError
from colossal.tensor import Layout, Placement
from colossal.testing import run_processes, run_threads

OVERFLOWS = st.lists(st.booleans(), max_size=40)
RULES = st.fixed_dictionaries(
    {
        "init_scale": st.floats(1e-3, 1e6),
        "growth_factor": st.floats(1.01, 1e3),
        "backoff_factor": st.floats(0.2, 0.99),
        "growth_interval": st.integers(1, 4),
    }
)
BAD = (math.inf, -math.inf, math.nan)


def optimizer_of(value: float = 1.0, size: int = 3) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.full((size,), value))], lr=1.0)


def take_step(scaler: DynamicScaler, optimizer: torch.optim.Optimizer, overflow: bool) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.zeros_like(parameter)
    if overflow:
        parameter.grad[0] = math.inf
    scaler.step(optimizer)


def trajectory(scaler: DynamicScaler, overflows: list[bool]) -> list[float]:
    optimizer, scales = optimizer_of(), [scaler.scale_value]
    for overflow in overflows:
        take_step(scaler, optimizer, overflow)
        assert scaler.skipped == overflow
        scales.append(scaler.scale_value)
    return scales


# ------------------------------------------------------------------------------------------ against torch


def trajectory_of_torch(rule: dict[str, Any], overflows: list[bool]) -> list[float]:
    optimizer, scaler = optimizer_of(), torch.amp.GradScaler("cpu", **rule)
    parameter = optimizer.param_groups[0]["params"][0]
    scales = [scaler.scale(torch.ones(())).item()]
    for overflow in overflows:
        parameter.grad = torch.full_like(parameter, math.inf if overflow else 0.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@settings(max_examples=200, deadline=None)
@given(rule=RULES, overflows=OVERFLOWS)
def test_the_scale_takes_the_values_of_torchs(rule, overflows) -> None:
    assert trajectory(DynamicScaler(ScalerConfig(**rule), "cpu"), overflows) == trajectory_of_torch(rule, overflows)


@settings(max_examples=50, deadline=None)
@given(scale=st.floats(1e-3, 1e6), grads=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=5))
def test_unscaled_gradients_are_those_of_torch(scale, grads) -> None:
    ours, theirs = optimizer_of(), optimizer_of()
    scaler, peer = DynamicScaler(ScalerConfig(init_scale=scale), "cpu"), torch.amp.GradScaler("cpu", init_scale=scale)
    peer.scale(torch.ones(()))
    for optimizer in (ours, theirs):
        parameter = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(len(grads)))
        parameter.grad = torch.tensor(grads)
    scaler.unscale(ours)
    peer.unscale_(theirs)
    for own, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert torch.equal(own.grad, other.grad)


def test_a_state_goes_to_torch_and_comes_back() -> None:
    scaler, peer = DynamicScaler(ScalerConfig(8.0, growth_interval=3), "cpu"), torch.amp.GradScaler("cpu")
    trajectory(scaler, [True, False])
    peer.load_state_dict(scaler.state_dict())
    assert {**scaler.state_dict(), **peer.state_dict()} == scaler.state_dict()
    assert peer.get_scale() == 4.0
    fresh = DynamicScaler(ScalerConfig(), "cpu")
    fresh.load_state_dict(peer.state_dict())
    rest = [False, False, False, True, False]
    assert trajectory(fresh, rest) == trajectory(scaler, rest) == [4.0, 4.0, 8.0, 8.0, 4.0, 4.0]


# ------------------------------------------------------------------------------------------ the rule


@settings(max_examples=200, deadline=None)
@given(
    overflows=OVERFLOWS,
    hysteresis=st.integers(1, 4),
    interval=st.integers(1, 4),
    low=st.integers(-3, 0),
    high=st.integers(0, 3),
)
def test_hysteresis_and_limits_move_the_scale_as_said(overflows, hysteresis, interval, low, high) -> None:
    rule = ScalerConfig(1.0, 2.0, 0.5, interval, 2.0**low, 2.0**high, hysteresis)
    scales = trajectory(DynamicScaler(rule, "cpu"), overflows)
    since_growth: list[bool] = []
    for before, overflow, after in zip(scales[:-1], overflows, scales[1:], strict=True):
        since_growth.append(overflow)
        last = since_growth[-interval:]
        if overflow:
            falls = sum(since_growth) >= hysteresis
            assert after == (max(before / 2, 2.0**low) if falls else before)
        elif len(last) == interval and not any(last):
            assert after == min(before * 2, 2.0**high)
            since_growth.clear()
        else:
            assert after == before


def test_the_documented_constructors_give_the_one_scaler() -> None:
    scaler = DynamicGradScaler(initial_scale=8, growth_interval=2, min_scale=4, max_scale=16, hysteresis=2)
    assert trajectory(scaler, [True, True, True, False, False, False, False, False, False]) == [
        8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 16.0, 16.0, 16.0,
    ]  # fmt: skip
    defaults = DynamicGradScaler().state_dict()
    assert (defaults["scale"], defaults["growth_interval"]) == (2.0**16, 1000)
    assert trajectory(DynamicGradScaler(), [True, True]) == [2.0**16, 2.0**16, 2.0**15]
    assert set(trajectory(ConstantGradScaler(3.0), [True, True, False] * 700)) == {3.0}
    assert type(scaler) is type(ConstantGradScaler(1.0)) is DynamicScaler


def test_a_constant_scale_stays_what_it_is_whatever_is_loaded() -> None:
    scaler = ConstantGradScaler(3.0)
    scaler.load_state_dict(DynamicGradScaler().state_dict())
    assert trajectory(scaler, [True, True]) == [3.0] * 3


def test_the_scale_never_leaves_float32() -> None:
    endless = DynamicScaler(ScalerConfig(2.0**126, growth_interval=1), "cpu")
    assert trajectory(endless, [False] * 3) == [2.0**126, 2.0**127, 2.0**127, 2.0**127]
    sinking = DynamicScaler(ScalerConfig(2.0**-125), "cpu")
    assert trajectory(sinking, [True] * 3) == [2.0**-125, 2.0**-126, 2.0**-126, 2.0**-126]


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": 0.0},
        {"init_scale": math.inf},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"min_scale": 2.0**17},
        {"max_scale": 2.0},
        {"min_scale": 0.0},
        {"hysteresis": 0},
    ],
)
def test_a_rule_that_cannot_work_is_refused(options) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"Found {name}="):
        ScalerConfig(**options)


def test_skipped_steps_are_logged_and_growth_if_wanted(logged) -> None:
    trajectory(DynamicGradScaler(8.0, growth_interval=1, hysteresis=1, verbose=True), [True, False])
    trajectory(DynamicGradScaler(16.0, growth_interval=1, hysteresis=1), [True, False])
    assert logged() == [
        "[rank 0] step skipped, a gradient overflowed: loss scale 8 -> 4",
        "[rank 0] 1 steps without an overflow: loss scale 4 -> 8",
        "[rank 0] step skipped, a gradient overflowed: loss scale 16 -> 8",
    ]


# ------------------------------------------------------------------------------------------ states


def test_limits_hysteresis_and_the_lack_of_a_state_stay_with_the_scaler() -> None:
    scaler = DynamicGradScaler(initial_scale=64.0, max_scale=128.0)
    scaler.load_state_dict({})
    assert scaler.scale_value == 64.0
    scaler.load_state_dict(DynamicScaler(ScalerConfig(2.0**16), "cpu").state_dict())
    assert trajectory(scaler, [True, True]) == [128.0, 128.0, 64.0]


def test_a_run_goes_on_in_the_middle_of_its_hysteresis() -> None:
    scaler, fresh = DynamicGradScaler(8.0), DynamicGradScaler(8.0)
    trajectory(scaler, [True])
    fresh.load_state_dict(scaler.state_dict())
    assert trajectory(fresh, [True]) == [8.0, 4.0]


@pytest.mark.parametrize(
    "state",
    [{"growth_factor": 2.0}, {"scale": "much"}, {"scale": 1.0, "growth_interval": -1}, {"scale": 1.0, "overflows": ""}],
)
def test_a_foreign_state_is_refused_and_changes_nothing(state) -> None:
    scaler = DynamicGradScaler(8.0)
    before = scaler.state_dict()
    with pytest.raises(CheckpointError, match="needs a state with its scale and rule"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


# ------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_bad_element_of_one_gradient_drops_the_step(bad, dtype) -> None:
    parameters = [nn.Parameter(torch.ones(4, dtype=each)) for each in (torch.float32, dtype, torch.float32)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    parameters[1].grad[3] = bad
    scaler = DynamicScaler(ScalerConfig(4.0), "cpu")
    assert scaler.step(optimizer) is None
    assert scaler.skipped
    assert scaler.scale_value == 2.0
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in parameters)
    parameters[1].grad[3] = 1.0
    for parameter in parameters[:2]:
        parameter.grad.fill_(1.0)
    scaler.step(optimizer)
    assert not scaler.skipped
    assert all(torch.equal(parameter, torch.full_like(parameter, 0.5)) for parameter in parameters[:2])


def test_values_of_sparse_gradients_are_divided() -> None:
    embedding = nn.Embedding(10, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    scaler = DynamicScaler(ScalerConfig(8.0), "cpu")
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.unscale(optimizer)
    assert torch.equal(embedding.weight.grad.to_dense()[:4, 0], torch.tensor([0.0, 2.0, 0.0, 1.0]))


def test_gradients_in_float16_are_refused() -> None:
    model = nn.Linear(2, 2).half()
    model(torch.ones(1, 2).half()).sum().backward()
    with pytest.raises(ConfigError, match="mixed_precision='fp16_naive'"):
        DynamicGradScaler().unscale(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_closure_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Found a closure"):
        DynamicGradScaler().step(optimizer_of(), lambda: 0.0)


def test_thrown_away_gradients_count() -> None:
    scaler, optimizer = DynamicScaler(ScalerConfig(8.0), "cpu"), optimizer_of()
    optimizer.param_groups[0]["params"][0].grad = torch.full((3,), math.nan)
    scaler.discard()
    assert scaler.scale_value == 8.0
    scaler.unscale(optimizer)
    scaler.discard()
    assert scaler.scale_value == 4.0
    assert scaler.scale(torch.ones(())).item() == 4.0


# ------------------------------------------------------------------------------------------ several ranks


def overflow_on_one_rank(bad_rank: int) -> list[tuple[bool, float]]:
    """Each rank has gradients of its own; all have to agree, or those that have a replica of the parameter."""
    rank = dist.get_rank()
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    seen = []
    for peers, replicas in (([dist.group.WORLD], ()), ([], (half, half)), ([dist.group.WORLD], (half,))):
        scaler, optimizer = DynamicScaler(ScalerConfig(8.0), "cpu"), optimizer_of()
        parameter = optimizer.param_groups[0]["params"][0]
        set_placement(parameter, Placement(Layout((3,), (rank,)), rank, replica_groups=replicas))
        parameter.grad = torch.full((3,), math.inf if rank == bad_rank else 0.0)
        scaler.unscale(optimizer, peers)
        scaler.step(optimizer)
        seen.append((scaler.skipped, scaler.scale_value))
    return seen


@pytest.mark.parametrize("bad_rank", [0, 3, None])
def test_an_overflow_on_one_rank_skips_the_step_on_replicas_and_peers(bad_rank) -> None:
    fell, stayed = (True, 4.0), (False, 8.0)
    for rank, (all_peers, replicas, both) in enumerate(run_threads(overflow_on_one_rank, 4, bad_rank)):
        assert all_peers == both == (stayed if bad_rank is None else fell)
        assert replicas == (fell if bad_rank is not None and rank // 2 == bad_rank // 2 else stayed)


def test_an_optimizer_that_unscales_by_itself_skips_a_step_whose_norm_is_not_finite() -> None:
    scaler, optimizer, seen = DynamicScaler(ScalerConfig(8.0), "cpu"), optimizer_of(), []
    for norm in (math.inf, 1.0):
        divide = scaler.overflow_from_norm(torch.tensor(norm))
        assert scaler.overflow_from_norm(torch.tensor(norm)) is None
        scaler.step(optimizer)
        seen.append((divide, scaler.skipped, scaler.scale_value))
    assert seen == [(8.0, True, 4.0), (4.0, False, 4.0)]


class Elsewhere(torch.Tensor):
    """On another device, as far as one sees: ``cpu:0`` is not ``cpu``."""

    device = torch.device("cpu", 0)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_overflow_on_one_of_several_devices_drops_the_step(bad) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for index, parameter in enumerate(parameters):
        grad = torch.full((2,), math.inf if index == bad else 1.0)
        parameter.grad = grad.as_subclass(Elsewhere) if index == 1 else grad
    assert len({parameter.grad.device for parameter in parameters}) == 2
    scaler = DynamicScaler(ScalerConfig(4.0), "cpu")
    scaler.step(torch.optim.SGD(parameters, lr=1.0))
    assert scaler.skipped
    assert [parameter.grad[0].item() for parameter in parameters] == [math.inf if i == bad else 0.25 for i in range(3)]


def overflow_in_one_shard() -> tuple[list[bool], float, torch.Tensor, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Replicate(), Shard(0)]
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, placements))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler, seen = DynamicScaler(ScalerConfig(8.0), "cpu"), []
    for bad in (False, True):
        local = torch.ones(2, 3)
        if bad and dist.get_rank() in {1, 3}:
            local[0, 0] = math.inf
        parameter.grad = DTensor.from_local(local, mesh, placements)
        scaler.step(optimizer)
        seen.append(scaler.skipped)
    return seen, scaler.scale_value, parameter.detach().to_local().clone(), parameter.grad.to_local().clone()


def test_an_overflow_in_one_shard_drops_the_step_of_the_whole_tensor() -> None:
    for seen, scale, parameter, grad in run_processes(overflow_in_one_shard, 4):
        assert (seen, scale) == ([False, True], 4.0)
        assert torch.equal(parameter, torch.full((2, 3), 1 - 1 / 8))
        assert grad[1, 0] == 1 / 8


def test_a_scaler_can_be_copied() -> None:
    scaler = DynamicGradScaler(8.0)
    twin = copy.deepcopy(scaler)
    trajectory(twin, [True, True])
    assert (scaler.scale_value, twin.scale_value) == (8.0, 4.0)
