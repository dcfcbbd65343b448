"""What a plugin can do, found out by doing it: a small training in a world of one process."""

import gc
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

YES, NO, PLANNED = "yes", "no", "planned"

# What the library's refusals say of options that are documented and not built.
_PLANNED_PHRASES = (" yet", "for now")


@dataclass(frozen=True)
class TrialProgram:
    """A boosted training program of two layers, which can make steps and write files."""

    make_plugin: Callable[[], Any] | None  # makes the plugin that is tried; None for a Booster without one
    folder: Path
    precision: str | None = None
    booster: Any = field(init=False)
    model: Any = field(init=False)
    optimizer: Any = field(init=False)

    def __post_init__(self) -> None:
        import torch

        from colossal.booster import Booster

        plugin = self.make_plugin() if self.make_plugin else None
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
        booster = Booster("cpu", self.precision, plugin)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters()))
        for name, value in {"booster": booster, "model": boosted, "optimizer": optimizer}.items():
            object.__setattr__(self, name, value)

    def backward(self) -> None:
        """A forward and a backward pass."""
        import torch

        self.booster.backward(self.model(torch.ones(2, 16)).float().sum(), self.optimizer)

    def step(self) -> None:
        """A full step."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def try_action(action: Callable[[], object]) -> str:
    """Whether the library does something, refuses it, or refuses it until it is built."""
    # Errors other than a refusal are mistakes of ours, and are raised.
    from colossal.errors import ConfigError, UnsupportedError

    try:
        action()
    except (ConfigError, UnsupportedError) as error:
        return PLANNED if any(promise in str(error) for promise in _PLANNED_PHRASES) else NO
    return YES


def has_own_precision(plugin: type) -> bool:
    """Whether a plugin takes the precision itself, instead of the Booster."""
    return "precision" in inspect.signature(plugin).parameters


@contextmanager
def single_process_group() -> Iterator[Path]:
    """Makes a process group of this process alone, on the CPU, with a temporary folder."""
    from torch import distributed as dist

    from colossal._src.cluster.mesh import set_ambient_mesh

    before = os.environ.get("COLOSSAL_DEVICE")
    os.environ["COLOSSAL_DEVICE"] = "cpu"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        set_ambient_mesh(None)
        gc.collect()  # sharded models hold the group's connections, in cycles
        dist.destroy_process_group()
        os.environ.pop("COLOSSAL_DEVICE")
        os.environ.update({} if before is None else {"COLOSSAL_DEVICE": before})
