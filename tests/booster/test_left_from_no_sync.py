# pyright: reportArgumentType=false
"""A step by gradients that were accumulated inside of no_sync only: refused on all ranks, whatever averages them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from colossal import comm
from colossal._src.tensor import Layout, Placement, set_placement
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError
from colossal.testing import assert_close, run_processes

BATCH = torch.linspace(-1, 1, 32, dtype=torch.float64).sin().view(8, 4)


class Table(nn.Module):
    """Adds a row to each sample, as experts do: ranks along ep have some of the rows."""

    def __init__(self, mesh: ParallelMesh | None) -> None:
        super().__init__()
        rows = torch.linspace(-0.5, 0.5, 16, dtype=torch.float64).view(4, 4)
        self.mesh, self.rows = mesh, nn.Parameter(rows if mesh is None else rows.chunk(2)[mesh.rank("ep")].clone())
        if mesh is not None:
            layout = Layout.parse("S0R", (4, 4), mesh=mesh, axes=["ep"])
            set_placement(self.rows, Placement(layout, mesh.global_rank, shard_groups=(mesh.group("ep"),)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows if self.mesh is None else comm.gather(self.rows, "ep", 0, self.mesh, partial_grad=True)
        return x * rows[(x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def layers(*last: nn.Module) -> nn.Sequential:
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), *last).double()
    with torch.no_grad():
        for parameter in (*model[0].parameters(), *model[2].parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view_as(parameter))
    model[0].requires_grad_(False)  # the first stage trains nothing
    return model


def only_last(*last: nn.Module) -> nn.Sequential:
    model = layers(*last)
    model[2].requires_grad_(False)  # what others than `HookedAverager` average
    return model


def stages() -> Any:
    return HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32")


WORLDS: dict[str, tuple[Callable[[ParallelMesh | None], nn.Module], Callable[[], Any]]] = {
    "pp": (lambda _: layers(), stages),
    "experts": (lambda mesh: only_last(Table(mesh)), TorchDDPPlugin),
    "scalars": (lambda _: only_last(Scale()), TorchFSDPPlugin),
}


def train(name: str, mesh: ParallelMesh | None) -> tuple[str, torch.Tensor]:
    """Return the error of a step by what is left, and the outputs after a step of two passes that follows."""
    build, plugin = WORLDS[name]
    model: Any = build(mesh)
    booster = Booster(device="cpu", plugin=plugin() if mesh else None)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(trained or model.parameters(), lr=0.1))
    assert optimizer is not None
    rank, size = booster.plugin.data_parallel_rank_and_size() if booster.plugin else (0, 1)

    def run(to_optimizer: Any = optimizer) -> Any:
        batch = BATCH.chunk(size)[rank] if to_optimizer else BATCH
        done = booster.execute_pipeline(
            iter([batch]), model, lambda outputs, _: outputs.square().mean(), to_optimizer, return_outputs=True
        )
        return done["outputs"]

    with booster.no_sync(model) if mesh else nullcontext():
        run()
    text = ""
    try:
        optimizer.step()
    except ConfigError as error:
        text = str(error)
    if not mesh:
        model.unwrap().load_state_dict(build(None).state_dict())
    optimizer.zero_grad()
    with booster.no_sync(model) if mesh else nullcontext():
        run()
    run()
    optimizer.step()
    with torch.no_grad():
        return text, run(None)


def train_all() -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, sizes in {"pp": {"pp": 2, "dp": 2}, "experts": {"dp": 4, "ep": 2}, "scalars": {"dp": 4}}.items():
        with ParallelMesh(**sizes) as mesh:
            found.append(train(name, mesh))
    return found


@pytest.mark.slow
def test_a_step_by_gradients_that_nobody_averaged_is_refused() -> None:
    expected = {name: train(name, None)[1] for name in WORLDS}
    for found in run_processes(train_all, 4):
        for (text, outputs), (name, wanted) in zip(found, expected.items(), strict=True):
            assert "accumulated inside of no_sync and not averaged since" in text, name
            if outputs is not None:  # of the last stage
                assert_close(outputs, wanted, rtol=1e-9, atol=1e-12)
