# pyright: reportArgumentType=false
"""Ranks that boost different models, optimizers, plugins or precisions are told so, all of them, before they train."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from colossal import nn as parallel
from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError
from colossal.testing import run_threads


def model_of(width: int = 4, dtype: torch.dtype = torch.float32, bias: bool = True, frozen: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, width, bias=bias), nn.Linear(width, 4)).to(dtype)
    model[1].requires_grad_(requires_grad=not frozen)
    return model


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


@dataclass(frozen=True)
class Program:
    """What a rank builds."""

    model: Callable[[], nn.Module] = model_of
    optimizer: Callable[..., torch.optim.Optimizer] = sgd
    plugin: Callable[[], Any] = TorchDDPPlugin
    precision: str | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        with ParallelMesh(**self.mesh):
            model = self.model()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            booster = Booster(device="cpu", plugin=self.plugin(), mixed_precision=self.precision)
            loader = None
            if self.loader:
                length = self.loader.get("length", 8)
                options = {name: value for name, value in self.loader.items() if name != "length"}
                loader = booster.plugin.prepare_dataloader(torch.arange(length), **{"batch_size": 2} | options)
            booster.boost(model, self.optimizer(trained), dataloader=loader)


def groups(parameters: list[nn.Parameter], sizes: tuple[int, ...]) -> torch.optim.Optimizer:
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return torch.optim.SGD([{"params": parameters[begin:end]} for begin, end in pairwise(ends)], lr=0.1)


DIFFERENT: dict[str, tuple[Program, str]] = {
    "optimizer": (
        Program(optimizer=partial(torch.optim.Adam, lr=0.1)),
        r"the optimizer \(SGD on rank 0, Adam on rank 1\)",
    ),
    "learning rate": (
        Program(optimizer=partial(sgd, lr=0.2)),
        r"lr of the optimizer's group 0 \(0\.1 on rank 0, 0\.2 on rank 1\)",
    ),
    "width": (
        Program(partial(model_of, 8)),
        r"parameter 0\.weight \(\[4, 4\] torch\.float32 trains on rank 0, \[8, 4\]",
    ),
    "dtype": (Program(partial(model_of, dtype=torch.float64)), r"trains on rank 0, \[4, 4\] torch\.float64"),
    "a parameter": (Program(partial(model_of, bias=False)), r"parameter 0\.bias \(.* on rank 0, nothing on rank 1\)"),
    "frozen": (Program(partial(model_of, frozen=True)), r"parameter 1\.weight \(.* trains on rank 0, .* frozen on"),
    "precision": (Program(precision="bf16"), r"the precision \(None on rank 0, BF16\w*\(.*\) on rank 1\)"),
    "option": (
        Program(plugin=partial(TorchDDPPlugin, bucket_cap_mb=1)),
        r"the plugin \(TorchDDPPlugin\(.*bucket_cap_mb=25.*\) on rank 0, .*bucket_cap_mb=1.* on rank 1\)",
    ),
    "plugin": (
        Program(plugin=partial(LowLevelZeroPlugin, precision="fp32")),
        r"the plugin \(TorchDDPPlugin\(.*\) on rank 0, LowLevelZeroPlugin\(",
    ),
}


def boost_other_on_the_last_rank(usual: Program, other: Program) -> str:
    try:
        (other if dist.get_rank() == dist.get_world_size() - 1 else usual).run()
    except ConfigError as error:
        return str(error)
    return ""


LOADERS: dict[str, dict[str, Any]] = {  # ranks would read samples twice, or one of them fewer batches
    r"seed of the data loader \(0 on rank 0, 1 on rank 1\)": {"seed": 1},
    r"seed of the data loader \(0 on rank 0, None on rank 1\)": {"shuffle": False},
    r"length of the data loader \(8 on rank 0, 10 on rank 1\)": {"length": 10},
    r"batch_size of the data loader \(2 on rank 0, 1 on rank 1\)": {"batch_size": 1},
    r"drop_last of the data loader \(False on rank 0, True on rank 1\)": {"drop_last": True},
}


@pytest.mark.parametrize("match", LOADERS)
def test_loaders_that_differ_are_named_on_all_ranks(match: str) -> None:
    usual = {"shuffle": True, "seed": 0}
    programs = Program(loader=usual), Program(loader=usual | LOADERS[match])
    for found in run_threads(boost_other_on_the_last_rank, 2, *programs):
        assert re.search(match, found)
    assert run_threads(boost_other_on_the_last_rank, 2, *programs[:1] * 2) == ["", ""]


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_named_on_all_ranks(what: str) -> None:
    other, match = DIFFERENT[what]
    first, *others = run_threads(boost_other_on_the_last_rank, 2, Program(), other)
    assert others == [first]
    with pytest.raises(ConfigError, match=f"{match}.*the same ones on all ranks"):
        raise ConfigError(first)


PLUGINS: dict[str, tuple[int, Program]] = {
    "tp": (2, Program(lambda: parallel.Linear(4, 4), plugin=lambda: None, mesh={"tp": 2})),
    "DDP": (3, Program()),
    "ZeRO": (2, Program(plugin=partial(LowLevelZeroPlugin, precision="fp32"))),
    "Gemini": (2, Program(plugin=partial(GeminiPlugin, precision="fp32"))),
    "FSDP": (2, Program(plugin=TorchFSDPPlugin)),
    "Hybrid, pp": (2, Program(plugin=partial(HybridParallelPlugin, 1, 2, precision="fp32", num_microbatches=2))),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_every_plugin_compares(name: str) -> None:
    size, usual = PLUGINS[name]
    other = Program(usual.model, partial(torch.optim.Adam, lr=0.1), usual.plugin, None, usual.mesh)
    for found in run_threads(boost_other_on_the_last_rank, size, usual, other):
        assert f"the optimizer (SGD on rank 0, Adam on rank {size - 1})" in found


def boost_something_else() -> bool:
    Program(partial(model_of, 4 + dist.get_rank()), plugin=lambda: None).run()
    return True


def test_ranks_without_a_plugin_may_train_what_they_like() -> None:
    assert run_threads(boost_something_else, 2) == [True, True]


def test_groups_are_compared_by_their_parameters() -> None:
    usual, other = (Program(optimizer=partial(groups, sizes=sizes)) for sizes in ((1, 3), (2, 2)))
    for found in run_threads(boost_other_on_the_last_rank, 2, usual, other):
        assert "the parameters of the optimizer's group 0 (1: 0.weight [" in found
        assert "on rank 0, 2: 0.weight, 0.bias [" in found


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_ranks_agree_along_every_axis(axis) -> None:
    def program() -> str:
        with ParallelMesh(tp=2) as mesh:
            model = model_of()
            booster = Booster(device="cpu", plugin=TorchDDPPlugin())
            with pytest.raises(ConfigError, match="lr of the optimizer's group 0") as found:
                booster.boost(model, sgd(model.parameters(), lr=0.1 * (1 + mesh.rank(axis))))
        return str(found.value)

    assert len(set(run_threads(program, 4))) == 1


def boost_stages() -> int:
    plugin = HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32")
    Booster(device="cpu", plugin=plugin).boost(model := model_of(), sgd(model.parameters()))
    return plugin.mesh.size("dp")


def test_ranks_that_are_threads_make_the_mesh_of_a_plugin_together() -> None:
    """An attribute that is computed by waiting for other ranks has no lock that they share."""
    assert run_threads(boost_stages, 4) == [2] * 4
