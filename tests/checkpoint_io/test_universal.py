# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""What one plugin and world saved, every other loads, and the run goes on as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import chosen
from digits import digits
from equality import assert_equal, assert_within_rounding
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossal.tensor import full_tensor_of
from colossal.testing import run_processes


def hybrid() -> TorchFSDPPlugin:
    """Two replicas of two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return TorchFSDPPlugin(process_group=mesh, sharding_strategy="HYBRID_SHARD")


PLUGINS: dict[str, Any] = {"none": lambda: None, "ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin, "hybrid": hybrid}
ZERO: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2, "reduce_bucket_size_in_m": 0.001},
    "zero replicas": {"stage": 2, "extra_dp_size": 2, "overlap_allgather": True},
}
HYBRID: dict[str, dict[str, Any]] = {
    "hybrid replicas": {"zero_stage": 0},
    "hybrid zero": {"zero_stage": 1, "zero_bucket_size_in_m": 0.001},
}
ZERO_PRECISION = {None: "fp32", "fp16_naive": "fp16", "bf16": "bf16"}
RUNS = [("none", 1), *((kind, size) for kind in ("ddp", "fsdp") for size in (1, 2, 4)), ("zero1", 2), ("zero2", 4)]
RUNS += [("hybrid replicas", 2), ("hybrid zero", 2)]
IN_GATE = [("none", 1), ("ddp", 2), ("fsdp", 4), ("zero1", 2), ("hybrid zero", 2)]
BEFORE, AFTER, GLOBAL_BATCH = 3, 3, 16
HALVES = ["fp16", "fp16_naive", "bf16"]


class Net(nn.Module):
    """A tie, a frozen layer, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(64, 33)
        self.body = nn.ModuleList([nn.Linear(33, 33), nn.LayerNorm(33)])
        self.tied = nn.Linear(33, 33)
        self.tied.weight = self.body[0].weight
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.head = nn.Linear(33, 10)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embed(x))
        for layer in (*self.body, self.tied, self.frozen):
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden) * self.scale[0]


def dtype_of(precision: str | None) -> torch.dtype:
    """Without a precision, float64: rounding in another order is no difference then."""
    return torch.float64 if precision is None else torch.float32


def start(kind: str, precision: str | None = None) -> tuple[Booster, tuple[Any, ...]]:
    if kind in ZERO:
        plugin = LowLevelZeroPlugin(precision=ZERO_PRECISION[precision], initial_scale=2.0**16, **ZERO[kind])
        booster = Booster(device="cpu", plugin=plugin)
    elif kind in HYBRID:
        plugin = HybridParallelPlugin(1, 1, precision=ZERO_PRECISION[precision], **HYBRID[kind])
        booster = Booster(device="cpu", plugin=plugin)
    else:
        booster = Booster(device="cpu", plugin=PLUGINS[kind](), mixed_precision=precision)
    model = Net().to(dtype_of(precision))
    decayed = [p for name, p in model.named_parameters() if p.requires_grad and name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if p.requires_grad and not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=BEFORE + AFTER, warmup_steps=2)
    return booster, booster.boost(model, optimizer, nn.CrossEntropyLoss(), None, schedule)


def train(booster: Booster, boosted: tuple[Any, ...], first: int, steps: int, precision: str | None = None) -> None:
    model, optimizer, criterion, _, schedule = boosted
    images, labels = digits()
    rank, size = booster.plugin.data_parallel_rank_and_size()
    for step in range(first, first + steps):
        rows = slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        inputs = torch.tensor(images[rows], dtype=dtype_of(precision))[rank::size] / 16
        booster.backward(criterion(model(inputs), torch.tensor(labels[rows])[rank::size]), optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: full_tensor_of(value).detach().clone().double() for name, value in model.unwrap().state_dict().items()
    }


def save(kind: str, root: str, precision: str | None = None, use_async: bool = False) -> dict[str, torch.Tensor]:
    """Train, save, train on; return where the uninterrupted run got to."""
    booster, boosted = start(kind, precision)
    train(booster, boosted, 0, BEFORE, precision)
    booster.save(Path(root, f"{kind}-{dist.get_world_size()}"), *boosted[:2], boosted[4], BEFORE, use_async=use_async)
    train(booster, boosted, BEFORE, AFTER, precision)
    booster.checkpoint_io.synchronize()
    return parameters(boosted[0])


def load_all(kind: str, root: str, saved: list[str], precision: str | None = None) -> dict[str, Any]:
    """Go on from each of the checkpoints; return where each run got to."""
    reached = {}
    for name in saved:
        booster, boosted = start(kind, precision)
        for parameter in boosted[0].parameters():
            torch.nn.init.constant_(parameter, 3.0)
        assert booster.latest_step(Path(root, name)) == BEFORE
        first = booster.load(Path(root, name), *boosted[:2], boosted[4])
        train(booster, boosted, first, AFTER, precision)
        reached[name] = parameters(boosted[0])
    return reached


def assert_all_equal(
    reached: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Compare parameters: in float64, or by the rounding of half precision."""
    assert reached.keys() == expected.keys()
    for name, value in expected.items():
        if exact is None:
            assert_equal(reached[name], value, name)
        else:
            assert_within_rounding(reached[name], value, exact[name], dtype, name)


@pytest.mark.chosen
@pytest.mark.parametrize(
    ("runs", "use_async"),
    [
        pytest.param(IN_GATE, False, id="some"),
        pytest.param(RUNS, False, id="all", marks=pytest.mark.slow),
        pytest.param(RUNS, True, id="async", marks=pytest.mark.slow),
    ],
)
def test_any_world_goes_on_from_any_other(tmp_path: Path, runs: list[tuple[str, int]], use_async: bool) -> None:
    uninterrupted = {
        f"{kind}-{size}": run_processes(save, size, kind, str(tmp_path), use_async=use_async)[0] for kind, size in runs
    }
    start_values = dict(Net().named_parameters())
    moved = {
        name: (value - start_values[name]).abs().max()
        for name, value in uninterrupted["none-1"].items()
        if name in start_values and start_values[name].requires_grad
    }
    assert min(moved.values()) > 1e-3, "a run that does not move proves nothing"
    for kind, size in [("ddp", 4), ("fsdp", 2)] if use_async else runs:
        saved = chosen(list(uninterrupted), 2, f"what {kind}-{size} loads")
        for rank in run_processes(load_all, size, kind, str(tmp_path), saved):
            for name, reached in rank.items():
                assert_all_equal(reached, uninterrupted["none-1"])
                assert_all_equal(reached, uninterrupted[name])


@pytest.mark.slow
def test_replicas_of_shards_go_on_too(tmp_path: Path) -> None:
    kinds = [("hybrid", 4), ("zero replicas", 4), ("fsdp", 2), ("none", 1)]
    saved = {f"{kind}-{size}": run_processes(save, size, kind, str(tmp_path))[0] for kind, size in kinds}
    for kind, size in kinds:
        for reached in run_processes(load_all, size, kind, str(tmp_path), list(saved))[0].values():
            assert_all_equal(reached, saved["none-1"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", HALVES)
def test_half_precision_goes_on_too(tmp_path: Path, precision: str) -> None:
    left_out = {"fp16": (*ZERO, *HYBRID), "fp16_naive": ("fsdp",), "bf16": ()}[precision]
    kinds = [run for run in RUNS if run[0] not in left_out]
    kinds = [run for run in kinds if run[1] < 4 or run[0] == "zero2"]
    uninterrupted = {
        f"{kind}-{size}": run_processes(save, size, kind, str(tmp_path), precision)[0] for kind, size in kinds
    }
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    exact = run_processes(save, 1, "none", str(tmp_path / "exact"))[0]
    for kind, size in kinds:
        reached = run_processes(load_all, size, kind, str(tmp_path), list(uninterrupted), precision)[0]
        for name, values in reached.items():
            assert_all_equal(values, uninterrupted[name], exact, dtype)
        own = f"{kind}-{size}"
        assert all(torch.equal(reached[own][name], value) for name, value in uninterrupted[own].items())


@pytest.mark.parametrize("use_safetensors", [False, True])
def test_masters_hear_of_a_model_that_is_loaded_alone(tmp_path: Path, use_safetensors: bool) -> None:
    saved, booster = nn.Linear(33, 10).half(), Booster(device="cpu", mixed_precision="fp16_naive")
    booster.save_model(saved, tmp_path / "model", use_safetensors=use_safetensors)
    model = nn.Linear(33, 10)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.load_model(model, tmp_path / "model")
    booster.backward(model(torch.zeros(2, 33)).sum() * 0, optimizer)
    optimizer.step()
    assert torch.equal(model.unwrap().weight, saved.weight)


def resume_with_dropout(root: str, resumed: bool) -> list[float]:
    """Draw random numbers before and after a checkpoint; return those after it."""
    booster, boosted = start("ddp")
    torch.manual_seed(dist.get_rank() + 1)
    torch.rand(3)
    if resumed:
        torch.manual_seed(0)
        booster.load(root, *boosted[:2], boosted[4])
    else:
        booster.save(root, *boosted[:2], boosted[4], step=1)
    return torch.rand(3).tolist()


def test_random_numbers_go_on(tmp_path: Path) -> None:
    first = run_processes(resume_with_dropout, 2, str(tmp_path), resumed=False)
    assert first[0] != first[1]
    assert run_processes(resume_with_dropout, 2, str(tmp_path), resumed=True) == first
    more = run_processes(resume_with_dropout, 4, str(tmp_path), resumed=True)
    assert more[:2] == first
    assert len({tuple(each) for each in more}) == 4
    assert run_processes(resume_with_dropout, 4, str(tmp_path), resumed=True) == more
