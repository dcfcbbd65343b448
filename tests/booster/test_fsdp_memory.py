# pyright: reportArgumentType=false
"""What sharding is for: each rank holds less."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossal.tensor import local_of
from colossal.testing import run_processes

pytestmark = pytest.mark.slow

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
M_MMAP_THRESHOLD = -3  # of malloc.h
WIDTH, BLOCKS, RANKS = 1024, 12, 4
WHOLE = BLOCKS * WIDTH * WIDTH * 4  # bytes of the parameters


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def bytes_in(name: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def held_bytes(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Count the bytes of this rank at the end of a backward pass."""
    state = [value for entries in optimizer.state.values() for value in entries.values() if value.dim()]
    tensors = {
        "parameters": list(model.parameters()),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "optimizer": state,
    }
    return {kind: sum(local_of(tensor).nbytes for tensor in found) for kind, found in tensors.items()}


def measure(plugin: Any) -> tuple[dict[str, int], int]:
    """Return what a rank holds, and how far its resident memory rose while it trained."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # or freed blocks stay resident, for the next ones
    warm = Booster(device="cpu", plugin=plugin).boost(nn.Linear(2, 2), None)[0]
    warm(torch.ones(1, 2)).sum().backward()
    before = bytes_in("VmRSS")
    torch.manual_seed(0)
    booster = Booster(device="cpu", plugin=plugin)
    model = Blocks()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    CLEAR_REFS.write_text("5")  # forget the peak of building the whole model
    for _ in range(3):
        optimizer.zero_grad()
        booster.backward(model(torch.ones(1, WIDTH)).sum(), optimizer)
        optimizer.step()
    held = held_bytes(model, optimizer)
    dist.barrier()
    return held, bytes_in("VmHWM") - before


def test_a_rank_holds_its_part_of_everything() -> None:
    for held, _ in run_processes(measure, RANKS, TorchFSDPPlugin(), fresh=True):
        assert held == {"parameters": WHOLE / RANKS, "gradients": WHOLE / RANKS, "optimizer": 2 * WHOLE / RANKS}
    for held, _ in run_processes(measure, 2, TorchDDPPlugin(), fresh=True):
        assert held == {"parameters": WHOLE, "gradients": WHOLE, "optimizer": 2 * WHOLE}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_the_peak_of_a_rank_is_far_below_that_of_ddp(strategy) -> None:
    sharded = max(
        peak for _, peak in run_processes(measure, RANKS, TorchFSDPPlugin(sharding_strategy=strategy), fresh=True)
    )
    replicated = min(peak for _, peak in run_processes(measure, RANKS, TorchDDPPlugin(), fresh=True))
    assert replicated > 4 * WHOLE
    assert sharded < 0.5 * replicated
