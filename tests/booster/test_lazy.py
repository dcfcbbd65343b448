# pyright: reportArgumentType=false, reportCallIssue=false
"""Models that are built lazily train as those that are built at once, and no rank ever holds more than it needs."""

import ctypes
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import plugins
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import LowLevelZeroPlugin, TorchFSDPPlugin
from colossal.errors import ConfigError
from colossal.lazy import LazyInitContext, lazy_tensors
from colossal.nn.optimizer import HybridAdam
from colossal.tensor import full_tensor_of
from colossal.testing import run_processes

pytestmark = pytest.mark.slow

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
M_MMAP_THRESHOLD = -3  # of malloc.h
WIDTH, BLOCKS, RANKS = 1024, 12, 4
BLOCK = (WIDTH * WIDTH + WIDTH) * 4  # bytes

PLUGINS = plugins("none", "DDP", "FSDP", "ZeRO-1") | {
    "FSDP of the first rank": partial(TorchFSDPPlugin, sync_module_states=True),
    "ZeRO-2": partial(LowLevelZeroPlugin, stage=2, precision="bf16", reduce_bucket_size_in_m=0.0001),
}


class Tied(nn.Module):
    """Blocks, a parameter without dimensions, buffers of both kinds, a frozen part and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.factor = nn.Parameter(torch.tensor(1.5) * 2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("slope", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(self.frozen(x) * self.factor * self.slope.to(x.dtype)))


def train(plugin: str, lazily: bool, kind: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    with LazyInitContext() if lazily else nullcontext():
        model = Tied()
    assert bool(list(lazy_tensors(model))) == lazily
    model, optimizer, *_ = booster.boost(model, kind(model.parameters(), lr=0.1))
    assert not list(lazy_tensors(model))
    losses = []
    for step in range(3):
        tokens = (torch.arange(26) * 5 + step) % 13
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: full_tensor_of(value).clone() for name, value in model.unwrap().state_dict().items()}


@pytest.mark.parametrize(
    ("plugin", "kind"),
    [*((plugin, torch.optim.AdamW) for plugin in PLUGINS), ("FSDP", HybridAdam), ("ZeRO-2", HybridAdam)],
)
def test_it_trains_as_if_it_had_been_built_at_once(plugin: str, kind: Any) -> None:
    results = {}
    for lazily in (False, True):
        results[lazily] = run_processes(seeded, 2, train, plugin, lazily, kind)
    for (losses, state), (lazy_losses, lazy_state) in zip(results[False], results[True], strict=True):
        assert losses == lazy_losses
        assert state.keys() == lazy_state.keys()
        for name, value in state.items():
            assert torch.equal(value, lazy_state[name]), name


def seeded(function: Any, *args: Any) -> Any:
    torch.manual_seed(7)
    return function(*args)


def boost_of_the_first() -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    with LazyInitContext():
        model = Tied()
        model.slope.uniform_()  # not in checkpoints
    model, *_ = Booster(device="cpu", plugin=TorchFSDPPlugin(sync_module_states=True)).boost(model)
    inner = model.unwrap()
    return {
        name: full_tensor_of(value).detach().clone()
        for name, value in [*inner.named_parameters(), *inner.named_buffers()]
    }


def test_all_ranks_may_start_from_the_values_of_the_first() -> None:
    first, second = run_processes(boost_of_the_first, 2)
    torch.manual_seed(0)
    expected = Tied()
    expected.slope.uniform_()
    for name, value in [*expected.named_parameters(), *expected.named_buffers()]:
        assert torch.equal(first[name], value.detach()), name
        assert torch.equal(second[name], value.detach()), name


def boost_other_values() -> None:
    with LazyInitContext():
        model = nn.Linear(3, 4)
        model.weight.data.fill_(dist.get_rank())
    with pytest.raises(ConfigError, match=r"1 tensors that differ: weight"):
        Booster(device="cpu", plugin=TorchFSDPPlugin()).boost(model)


def test_other_values_on_another_rank_are_an_error() -> None:
    run_processes(seeded, 2, boost_other_values)


def boost_one_lazily(sync_module_states: bool) -> None:
    with LazyInitContext() if dist.get_rank() else nullcontext():
        model = nn.Linear(3, 4)
    plugin = TorchFSDPPlugin(sync_module_states=sync_module_states)
    with pytest.raises(ConfigError, match=f"which built {2 * dist.get_rank()} of 2 lazily"):
        Booster(device="cpu", plugin=plugin).boost(model)


@pytest.mark.parametrize("sync_module_states", [False, True])
def test_one_rank_that_builds_at_once_is_an_error(sync_module_states) -> None:
    run_processes(seeded, 2, boost_one_lazily, sync_module_states)


def bytes_in(name: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def rise(lazily: bool) -> int:
    """Return how far resident memory rose while a model was built and boosted."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # or freed blocks stay resident, for the next ones
    booster = Booster(device="cpu", plugin=TorchFSDPPlugin())
    with LazyInitContext():
        warm = nn.Sequential(nn.Linear(64, 64))
    booster.boost(warm, torch.optim.AdamW(warm.parameters()))
    before = bytes_in("VmRSS")
    CLEAR_REFS.write_text("5")
    with LazyInitContext() if lazily else nullcontext():
        model = Blocks()
    booster.boost(model, torch.optim.AdamW(model.parameters()))
    return bytes_in("VmHWM") - before


def test_no_rank_holds_more_than_its_part_and_one_block() -> None:
    limit = BLOCKS * BLOCK / RANKS + 2 * BLOCK  # a block, and what it is cut with
    lazy, eager = (max(run_processes(rise, RANKS, lazily, fresh=True)) for lazily in (True, False))
    assert lazy < limit < BLOCKS * BLOCK < eager
