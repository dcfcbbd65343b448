"""Parameters in files, and states beside them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from chunked import BATCHES, EXACT, loss_of, model_of, own_rows, train_alone, train_chunked
from torch import nn

from colossal.errors import ConfigError
from colossal.nn.optimizer import HybridAdam
from colossal.testing import fake_world, run_threads
from colossal.zero.gemini import GeminiDDP, GeminiOptimizer, MemoryTier

OFFLOAD = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 6))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parameters_in_files_learn_alike(size: int, share: float, tmp_path: Path) -> None:
    model, options = model_of(build), {"nvme_param_frac": share, "nvme_offload_dir": str(tmp_path), **OFFLOAD}
    expected = train_alone(model)
    for rank in run_threads(lambda: train_chunked(model, **options), size):
        for name, value in expected["state"].items():
            torch.testing.assert_close(rank["state"][name], value, **EXACT)
    assert not list(tmp_path.iterdir()), "the files have no names"


def train_on_disk(model: nn.Module, folder: str, fraction: float) -> tuple[list[float], list[str], int]:
    model = copy.deepcopy(model)
    chunks = {n: {"chunk_size": 300} for n in (1, 2)}
    disk: Any = {"nvme_param_frac": fraction, "nvme_offload_dir": folder, **OFFLOAD}
    wrapped = GeminiDDP(model, mixed_precision=None, chunk_config_dict=chunks, **disk)
    adam = HybridAdam(wrapped.parameters(), lr=0.01, nvme_offload_fraction=fraction, nvme_offload_dir=folder)
    optimizer, losses = GeminiOptimizer(adam, wrapped), []
    for batch in BATCHES:
        loss = loss_of(wrapped, own_rows(batch.float()))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [chunk.placement.parameters.name for chunk in wrapped.chunks.chunks], adam.num_offloaded_bytes


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_and_states_on_disk_change_nothing(size: int, tmp_path: Path) -> None:
    model = model_of(build).float()
    plain = run_threads(lambda: train_on_disk(model, str(tmp_path), 0.0), size)
    away = run_threads(lambda: train_on_disk(model, str(tmp_path), 1.0), size)
    for (losses, placements, num_bytes), (expected, _, none) in zip(away, plain, strict=True):
        assert losses == expected
        assert set(placements) == {MemoryTier.DISK.name}
        assert num_bytes > none == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"nvme_param_frac": 0.5}, "Parameters on disk are parameters off the device"),
        ({"nvme_param_frac": 2.0, **OFFLOAD}, "nvme_param_frac is a fraction"),
        ({"nvme_param_frac": 1.0, "nvme_offload_dir": "missing", **OFFLOAD}, "Found missing"),
        ({"nvme_param_frac": 1.0, "placement_policy": "auto"}, "'auto' sets the fractions itself"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], match: str) -> None:
    with fake_world(2), pytest.raises(ConfigError, match=match):
        GeminiDDP(build(), mixed_precision=None, **options)
