# pyright: reportAttributeAccessIssue=false
"""Adam's states on a disk: the same numbers as in memory, to the last bit, and nothing left behind."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossal._src.nn.optimizer import adam_states as offload
from colossal.errors import CheckpointError, ConfigError, UnsupportedError
from colossal.nn.optimizer import CPUAdam, HybridAdam

FRACTIONS = (0.3, 0.5, 1.0)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that parameters of a test are cut into several, and share some."""
    monkeypatch.setattr(offload, "_BLOCK_NUMEL", 100)


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 3))


MODEL = build()
ROWS = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))


def make(model: nn.Module, fraction: float, folder: Path | None, kind: Any = HybridAdam) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02},
    ]
    return kind(groups, lr=0.01, nvme_offload_fraction=fraction, nvme_offload_dir=folder and str(folder))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, frozen: bool = False) -> None:
    optimizer.zero_grad()
    (model(ROWS) ** 2).mean().backward()
    if frozen:
        model[2].weight.grad = None
    optimizer.step()


def train(fraction: float, folder: Path | None, kind: Any = HybridAdam) -> list[torch.Tensor]:
    """Some steps, in one of which a parameter has no gradient."""
    model = copy.deepcopy(MODEL)
    optimizer = make(model, fraction, folder, kind)
    for number in range(4):
        step(model, optimizer, frozen=number == 1)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("kind", [CPUAdam, HybridAdam])
def test_the_same_bits_as_in_memory(fraction: float, kind: Any, tmp_path: Path) -> None:
    for own, expected in zip(train(fraction, tmp_path, kind), train(0.0, None, kind), strict=True):
        assert torch.equal(own, expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fraction", [0.0, *FRACTIONS])
def test_the_share_that_was_asked_for(fraction: float, tmp_path: Path) -> None:
    model = copy.deepcopy(MODEL)
    optimizer = make(model, fraction, tmp_path)
    step(model, optimizer)
    total = sum(parameter.numel() for parameter in model.parameters())
    away = optimizer.num_offloaded_bytes / 8
    in_memory = sum(entry["exp_avg"].numel() for entry in optimizer.state.values() if "exp_avg" in entry)
    assert away + in_memory == total
    assert away <= fraction * total
    assert away > fraction * total - max(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (1.0, 0.0), (0.5, 1.0), (1.0, 1.0)])
def test_states_are_saved_and_restored_on_either_side(before: float, after: float, tmp_path: Path) -> None:
    expected = copy.deepcopy(MODEL)
    alone = torch.optim.AdamW(expected.parameters(), lr=0.01)
    uninterrupted = copy.deepcopy(MODEL)
    whole = make(uninterrupted, 0.0, None)
    model = copy.deepcopy(MODEL)
    optimizer = make(model, before, tmp_path)
    for number in range(4):
        if number == 2:
            state = copy.deepcopy(optimizer.state_dict())
            assert all(entry["exp_avg"].abs().sum() > 0 for entry in state["state"].values())
            optimizer = make(model, after, tmp_path)
            optimizer.load_state_dict(state)
        step(model, optimizer)
        step(uninterrupted, whole)
        step(expected, alone)
    for own, other in zip(model.parameters(), uninterrupted.parameters(), strict=True):
        assert torch.equal(own, other)


def test_parameters_that_come_later_go_there_too(tmp_path: Path) -> None:
    model, late = copy.deepcopy(MODEL), nn.Linear(3, 50)
    optimizer = make(model, 1.0, tmp_path)
    step(model, optimizer)
    before = optimizer.num_offloaded_bytes
    optimizer.add_param_group({"params": list(late.parameters())})
    late.weight.grad = torch.ones_like(late.weight)
    start = late.weight.detach().clone()
    optimizer.step()
    assert optimizer.num_offloaded_bytes == before + 8 * (150 + 50)
    torch.testing.assert_close(late.weight.detach(), start - 0.01, rtol=0, atol=1e-6)


def test_half_precision_copies(tmp_path: Path) -> None:
    reached = []
    for fraction in (0.0, 1.0):
        param = nn.Parameter(torch.linspace(-1, 1, 250))
        optimizer = HybridAdam([param], lr=0.1, nvme_offload_fraction=fraction, nvme_offload_dir=str(tmp_path))
        copied = torch.zeros(250, dtype=torch.bfloat16)
        optimizer.set_param_copies({param: copied})
        param.grad = torch.linspace(1, 2, 250)
        optimizer.step(div_scale=4.0)
        assert torch.equal(copied, param.detach().bfloat16())
        reached.append(param.detach())
    assert torch.equal(*reached)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a folder that exists"):
        make(MODEL, 1.0, tmp_path / "nowhere")


@pytest.mark.parametrize("fraction", [-0.1, 1.5])
def test_a_share_is_between_0_and_1(fraction: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        make(MODEL, fraction, tmp_path)


def test_double_precision_does_not_go_to_a_disk(tmp_path: Path) -> None:
    param = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    param.grad = torch.ones(4, dtype=torch.float64)
    optimizer = HybridAdam([param], nvme_offload_fraction=1.0, nvme_offload_dir=str(tmp_path))
    with pytest.raises(UnsupportedError, match="at most 32 bits"):
        optimizer.step()


def test_an_error_of_the_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step raises; what is in memory, such as the parameters in it, is intact."""
    model = copy.deepcopy(MODEL)
    optimizer = make(model, 1.0, tmp_path)
    step(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def broken(*_: object, **__: object) -> None:
        raise CheckpointError("The disk must answer. Found that it does not. Replace it.")

    disk: Any = optimizer._disk
    monkeypatch.setattr(type(disk._stores[0].file), "read", broken)
    with pytest.raises(CheckpointError, match="disk must answer"):
        step(model, optimizer)
    for own, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(own, expected)
    monkeypatch.undo()
    monkeypatch.setattr(offload, "_BLOCK_NUMEL", 100)
    step(model, optimizer)
