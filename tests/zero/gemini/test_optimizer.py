# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Training in chunks equals one process in float64, wherever the chunks are kept."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from chosen import crossed
from chunked import (
    BATCHES,
    ROWS,
    WIDTH,
    Branches,
    Deep,
    adamw,
    assert_equal,
    draw,
    gradients_of,
    loss_of,
    model_of,
    own_rows,
    train_alone,
    train_chunked,
    wrap,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from colossal._src.zero.gemini import MemoryTier
from colossal.cluster import current_mesh
from colossal.errors import ConfigError, UnsupportedError
from colossal.nn.optimizer import HybridAdam
from colossal.testing import TOLERANCES, fake_world, run_threads
from colossal.zero.gemini import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer

PLACEMENTS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "one chunk": {"chunk_numel": 1000},
    "a chunk for each parameter": {"chunk_numel": 1},
    "searched": {"chunk_numel": None, "min_chunk_size_m": 1e-4, "search_range_m": 1e-4, "hidden_dim": 8},
    "prefetch": {"max_prefetch": 2},
    "half of it whole": {"shard_param_frac": 0.5},
    "all of it whole": {"shard_param_frac": 0.0},
    "strict": {"strict_ddp_mode": True},
    "half of the optimizer on the host": {"offload_optim_frac": 0.5},
    "the optimizer on the host": {"offload_optim_frac": 1.0},
    "whole, the optimizer on the host": {"offload_optim_frac": 1.0, "shard_param_frac": 0.0},
    "half of both on the host": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5},
    "all on the host": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "max_prefetch": 1},
    "reduced at once": {"enable_async_reduce": False},
    "auto": {"placement_policy": "auto"},
    "auto, roomy": {"placement_policy": "auto", "device_budget": 60_000},
    "auto, tight": {"placement_policy": "auto", "device_budget": 13_000, "warmup_non_model_data_ratio": 0.9},
    "auto, tight, prefetch": {"placement_policy": "auto", "device_budget": 13_500, "max_prefetch": 2},
}


@pytest.fixture(scope="module")
def branches() -> nn.Module:
    return model_of(Branches)


@pytest.fixture(scope="module")
def alone(branches: nn.Module) -> Any:
    return train_alone(branches)


def test_every_gradient_counts(alone: Any) -> None:
    """Adam would blow up the rounding of a gradient that is 0 in truth."""
    for step in alone["gradients"]:
        sizes = {name: grad.abs().max().item() for name, grad in step.items() if grad is not None}
        assert min(sizes.values()) > 1e-4, sizes
        assert [name for name, grad in step.items() if grad is None] == ["idle.weight", "idle.bias"]


@pytest.mark.chosen
@pytest.mark.parametrize(("size", "placement"), crossed([2, 3, 1, 4], PLACEMENTS, one_in=4))
def test_any_placement_trains_like_one_process(placement: str, size: int, branches: nn.Module, alone: Any) -> None:
    ranks = run_threads(train_chunked, size, branches, **PLACEMENTS[placement])
    assert_equal(ranks, alone)
    budget = PLACEMENTS[placement].get("device_budget")
    assert all(budget is None or rank["peak"] <= budget for rank in ranks)
    assert ranks[0]["num_chunks"] == {"one chunk": 2, "a chunk for each parameter": 14}.get(
        placement, ranks[0]["num_chunks"]
    )


def test_a_missing_reduction_would_be_seen(branches: nn.Module, alone: Any) -> None:
    own = train_alone(branches, [batch[: ROWS // 2] for batch in BATCHES])
    with pytest.raises(AssertionError, match="losses"):
        assert_equal([own], alone)


MAKERS = {
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=0.02, amsgrad=True),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "HybridAdam": partial(HybridAdam, lr=0.02, weight_decay=0.1),
}
SOME = ("on the device", "half of both on the host", "auto, tight")


@pytest.mark.parametrize("placement", SOME)
@pytest.mark.parametrize("maker", MAKERS)
def test_optimizers_that_work_by_element(maker: str, placement: str, branches: nn.Module) -> None:
    options = PLACEMENTS[placement]
    if "device_budget" in options:
        options = options | {"device_budget": 14_000}
    ranks = run_threads(train_chunked, 2, branches, make=MAKERS[maker], **options)
    assert_equal(ranks, train_alone(branches, make=MAKERS[maker]))


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("placement", [*SOME, "strict", "the optimizer on the host", "reduced at once"])
def test_accumulation_and_both_kinds_of_clipping(placement: str, size: int, branches: nn.Module) -> None:
    expected = train_alone(branches, max_norm=0.1, clip_value=0.02)
    ranks = run_threads(
        train_chunked, size, branches, accumulate=3, clip_norm=0.1, clip_value=0.02, **PLACEMENTS[placement]
    )
    assert_equal(ranks, expected)


@pytest.mark.parametrize("make", [adamw, MAKERS["HybridAdam"]])
def test_clipping_by_the_constructor(make: Any, branches: nn.Module) -> None:
    expected = train_alone(branches, make=make, max_norm=0.1)
    ranks = run_threads(train_chunked, 2, branches, make=make, max_norm=0.1)
    for rank in ranks:
        for name, value in expected["state"].items():
            torch.testing.assert_close(rank["state"][name], value, rtol=1e-5, atol=1e-7, msg=name)


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    first = [value for name, value in named.items() if name.endswith("weight") and value.requires_grad]
    rest = [value for name, value in named.items() if not name.endswith("weight") and value.requires_grad]
    return torch.optim.AdamW([{"params": rest, "lr": 0.05, "weight_decay": 0.0}, {"params": first}], lr=0.01)


def train_groups(model: nn.Module) -> dict[str, torch.Tensor]:
    wrapped, _ = wrap(model, None)
    optimizer = GeminiOptimizer(groups_of(wrapped.module), wrapped)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer.unwrap(), 0.5, 1.0, total_iters=3)
    for batch in BATCHES:
        optimizer.backward(loss_of(wrapped, own_rows(batch)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return wrapped.state_dict(only_rank_0=False)


def test_several_groups_and_a_schedule(branches: nn.Module) -> None:
    alone = model_of(Branches)
    optimizer = groups_of(alone)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=3)
    for batch in BATCHES:
        loss_of(alone, batch).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for state in run_threads(train_groups, 3, branches):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11, msg=name)


def train_replicas(model: nn.Module, **options: Any) -> Any:
    shards, replicas = current_mesh().blocks("dp", 2)
    return train_chunked(model, zero_group=shards, extra_dp_group=replicas, **options)


@pytest.mark.parametrize("placement", [*SOME, "prefetch"])
def test_replicas_of_the_shards(placement: str, branches: nn.Module, alone: Any) -> None:
    assert_equal(run_threads(train_replicas, 4, branches, **PLACEMENTS[placement]), alone)


def add_late(model: nn.Module) -> dict[str, torch.Tensor]:
    wrapped, _ = wrap(model, None, chunk_numel=50)
    optimizer = GeminiOptimizer(adamw(wrapped.module.enter.parameters()), wrapped)
    for number, batch in enumerate(BATCHES):
        if number == 1:
            optimizer.add_param_group({"params": list(wrapped.module.layers.parameters()), "lr": 0.05})
        optimizer.backward(loss_of(wrapped, own_rows(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.state_dict(only_rank_0=False)


@pytest.mark.parametrize("size", [1, 2])
def test_groups_that_are_added_later(size: int) -> None:
    model = model_of(Deep)
    alone = model_of(Deep)
    optimizer = adamw(alone.enter.parameters())
    for number, batch in enumerate(BATCHES):
        if number == 1:
            optimizer.add_param_group({"params": list(alone.layers.parameters()), "lr": 0.05})
        loss_of(alone, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in run_threads(add_late, size, model):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11, msg=name)


@st.composite
def cases(draw_: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Layers of random widths and kinds, some of them frozen, in chunks of any size, anywhere."""
    widths = [WIDTH, *draw_(st.lists(st.integers(1, 9), min_size=1, max_size=4))]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        linear = nn.Linear(before, after, bias=draw_(st.booleans()))
        layers += [linear.requires_grad_(draw_(st.integers(0, 4)) > 0), nn.Tanh()]
        if draw_(st.booleans()):
            layers.append(nn.LayerNorm(after))
    layers.append(nn.Linear(widths[-1], 2))
    optim = draw_(st.sampled_from([0.0, 0.3, 1.0]))
    options = draw_(
        st.sampled_from(
            [
                {"offload_optim_frac": optim, "offload_param_frac": optim * draw_(st.sampled_from([0.0, 0.5, 1.0]))},
                {"offload_optim_frac": optim, "shard_param_frac": draw_(st.sampled_from([0.0, 0.4, 1.0]))},
                {"placement_policy": "auto", "device_budget": draw_(st.integers(20_000, 40_000))},
            ]
        )
    )
    options |= {"chunk_numel": draw_(st.integers(1, 150)), "max_prefetch": draw_(st.integers(0, 3))}
    return nn.Sequential(*layers).double(), options


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


@settings(max_examples=20, deadline=None)
@given(case=cases(), size=st.integers(1, 4))
def test_any_network_in_any_chunks(case: tuple[nn.Module, dict[str, Any]], size: int) -> None:
    model, options = case
    ranks = run_threads(train_chunked, size, model, BATCHES[:2], make=sgd, **options)
    assert_equal(ranks, train_alone(model, BATCHES[:2], make=sgd))


def test_nothing_is_gathered_for_what_stays_whole(branches: nn.Module) -> None:
    for options in ({"strict_ddp_mode": True}, {"shard_param_frac": 0.0}):
        for each in run_threads(train_chunked, 2, branches, **options):
            assert "gather" not in each["moved"]


# ------------------------------------------------------------------------------------------------- half precision


def train_half(
    model: nn.Module, dtype: torch.dtype, steps: int, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    wrapped, optimizer = wrap(
        model, sgd, mixed_precision=dtype, **({"initial_scale": 2.0**10} if dtype == torch.float16 else {}), **options
    )
    losses = []
    for step in range(steps):
        loss = (wrapped(own_rows(draw(step, ROWS, WIDTH)).float()).float() ** 2).mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: value.float() for name, value in wrapped.state_dict(only_rank_0=False).items()}
    return losses, state, optimizer.scaler.scale_value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("placement", [*SOME, "strict", "the optimizer on the host"])
def test_half_precision_does_not_depend_on_the_placement(dtype: torch.dtype, placement: str) -> None:
    model = model_of(Deep).float()
    (_, expected, _) = run_threads(train_half, 1, model, dtype, 3)[0]
    for _, state, _ in run_threads(train_half, 1, model, dtype, 3, **PLACEMENTS[placement]):
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
    tolerance = TOLERANCES[dtype]
    ranks = run_threads(train_half, 2, model, dtype, 3, **PLACEMENTS[placement])
    for _, state, _ in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=tolerance.rtol, atol=tolerance.atol, msg=name)
            assert torch.equal(state[name], ranks[0][1][name])


def test_the_loss_scale_falls_until_a_step_succeeds() -> None:
    model = model_of(Deep).float()

    def program() -> tuple[float, bool]:
        wrapped, optimizer = wrap(model, sgd, mixed_precision=torch.float16, initial_scale=2.0**32)
        before = wrapped.state_dict(only_rank_0=False)["enter.weight"]
        scales = []
        for _ in range(20):
            optimizer.backward((wrapped(own_rows(BATCHES[0]).float()).float() ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
            scales.append(optimizer.scaler.scale_value)
        return scales[-1], bool(torch.equal(before, wrapped.state_dict(only_rank_0=False)["enter.weight"]))

    ranks = run_threads(program, 2)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] < 2.0**32
    assert not ranks[0][1]


# ------------------------------------------------------------------------------------------------- what is refused


def test_a_foreign_parameter_is_refused() -> None:
    with fake_world(2):
        model, _ = wrap(model_of(Deep), None)
        with pytest.raises(ConfigError, match=r"shape \(4, 3\). Build the optimizer of the model's own"):
            GeminiOptimizer(adamw([*model.parameters(), nn.Linear(3, 4).weight]), model)


def test_optimizers_that_look_at_more_than_one_element_are_refused() -> None:
    with fake_world(2):
        model, _ = wrap(model_of(Deep), None)
        for make in (torch.optim.Adafactor, torch.optim.LBFGS):
            with pytest.raises(UnsupportedError, match=make.__name__):
                GeminiOptimizer(make(model.parameters()), model)


def test_options_of_the_optimizer() -> None:
    with fake_world(2):
        offloaded = GeminiDDP(nn.Linear(4, 3), offload_optim_frac=1.0)
        with pytest.raises(UnsupportedError, match=r"gpu_margin_mem_ratio=0.5.*offload_optim_frac of 0"):
            GeminiAdamOptimizer(offloaded, gpu_margin_mem_ratio=0.5)
        on_device = GeminiDDP(nn.Linear(4, 3))
        assert GeminiAdamOptimizer(on_device, gpu_margin_mem_ratio=0.5).parameters
        assert all(chunk.placement.optimizer is MemoryTier.DEVICE for chunk in on_device.chunks.chunks)
        model = GeminiDDP(nn.Linear(4, 3))
        with pytest.raises(ConfigError, match=r"max_norm=-1.0"):
            GeminiAdamOptimizer(model, max_norm=-1.0)
        with pytest.raises(ConfigError, match="growth_factor"):
            GeminiAdamOptimizer(model, growth_factor=0.5)
        optimizer = GeminiAdamOptimizer(model, lr=1e-3, initial_scale=16)
        assert isinstance(optimizer.unwrap(), HybridAdam)
        assert optimizer.scaler.scale_value == 16


def test_a_group_of_a_foreign_parameter_is_refused() -> None:
    with fake_world(2):
        _, optimizer = wrap(model_of(Deep))
        with pytest.raises(ConfigError, match="Build the optimizer of the model's own"):
            optimizer.add_param_group({"params": [nn.Linear(3, 4).weight]})


def test_gradients_without_a_step_are_thrown_away() -> None:
    model = model_of(Deep)

    def program() -> Any:
        wrapped, optimizer = wrap(model)
        optimizer.backward(loss_of(wrapped, own_rows(draw(9, ROWS, WIDTH))))
        optimizer.zero_grad()
        optimizer.backward(loss_of(wrapped, own_rows(BATCHES[0])))
        optimizer.unscale_grad()
        return gradients_of(wrapped.module, optimizer)

    expected = train_alone(model, BATCHES[:1])["gradients"][0]
    for found in run_threads(program, 2):
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-11)
