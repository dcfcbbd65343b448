# pyright: reportArgumentType=false, reportCallIssue=false
"""Parameters that are sharded over ranks with different samples, as experts are, train as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_equal
from plugins import plugins
from torch import distributed as dist
from torch import nn

from colossal._src import comm
from colossal._src.booster.plugin.ddp.torch_ddp import DDPConfig
from colossal._src.booster.plugin.hybrid.pipelined_model import GradientAverager
from colossal._src.interface import unwrap_model
from colossal._src.tensor import Layout, Placement, Replicas, copy_placement, full_tensor_of, replicas_of, set_placement
from colossal.booster import Booster
from colossal.cluster import ParallelMesh
from colossal.errors import ColossalError
from colossal.testing import assert_equal_to_one_process, run_processes

PLUGINS = plugins("DDP", "ZeRO-1", "ZeRO-2", "Gemini")
REFUSED = plugins("FSDP")
NUM_EXPERTS, WIDTH, STEPS = 4, 6, 3
BATCHES = torch.randn(2 * STEPS, 8, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
WORLDS = [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}]


class Experts(nn.Module):
    """Scales each sample by the row of an expert; a rank stores some rows, and uses those of all."""

    def __init__(self, table: torch.Tensor, mesh: ParallelMesh | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        if mesh is None:
            self.table = nn.Parameter(table.clone())
            return
        # what other ranks of edp do not have: boost begins with the values of the first
        self.table = nn.Parameter(table.chunk(mesh.size("ep"))[mesh.rank("ep")] + float(mesh.rank("edp") > 0))
        layout = Layout.parse("S0R", (NUM_EXPERTS, WIDTH), mesh=mesh, axes=["ep"])
        placement = Placement(layout, mesh.global_rank, shard_groups=(mesh.group("ep"),))
        set_placement(self.table, placement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table if self.mesh is None else comm.gather(self.table, "ep", 0, self.mesh, partial_grad=True)
        return x * table[(x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()]


def model_of(mesh: ParallelMesh | None) -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(NUM_EXPERTS, WIDTH, generator=generator, dtype=torch.float64)
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Experts(table, mesh), nn.Linear(WIDTH, 2).double())


def train(booster: Booster, model: Any, optimizer: Any, number: int, rank: int) -> torch.Tensor:
    """Discard a pass, and accumulate two batches, before each step, and clip; return the norms."""
    norms: list[float] = []
    for step in range(STEPS):
        booster.backward(model(BATCHES[-1].chunk(number)[rank]).square().mean(), optimizer)
        optimizer.zero_grad(set_to_none=False)
        for batch in BATCHES[2 * step : 2 * step + 2]:
            booster.backward(model(batch.chunk(number)[rank]).square().mean() / 2, optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(norms, dtype=torch.float64)


def build(plugin: Any, mesh: ParallelMesh | None) -> tuple[Booster, Any, Any]:
    booster, model = Booster(device="cpu", plugin=plugin), model_of(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return booster, *booster.boost(model, optimizer)[:2]


def train_sharded(sizes: dict[str, int], expected: dict[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ParallelMesh(**sizes) as mesh:
        for name, make in PLUGINS.items():
            booster, model, optimizer = build(make(), mesh)
            found[name] = train(booster, model, optimizer, sizes["dp"], mesh.rank("dp"))
            assert_equal_to_one_process(model, expected, atol=1e-9)
            booster.save_model(model, str(folder / f"{name}.safetensors"), use_safetensors=True)
        for name, make in REFUSED.items():
            try:
                build(make(), mesh)
                found[name] = ""
            except ColossalError as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize("sizes", WORLDS, ids=str)
def test_equal_to_one_process(sizes: dict[str, int], tmp_path: Path) -> None:
    booster, model, optimizer = build(None, None)
    norms = train(booster, model, optimizer, 1, 0)
    expected = {name: each.detach() for name, each in unwrap_model(model).named_parameters()}
    for found in run_processes(train_sharded, sizes["dp"], sizes, expected, tmp_path):
        for name in PLUGINS:
            assert_equal(found[name], norms, f"{name}: norms")
        assert all("shard" in found[name] for name in REFUSED), found
    one = Booster(device="cpu").boost(model_of(None))[0]
    for name in PLUGINS:
        Booster(device="cpu").load_model(one, str(tmp_path / f"{name}.safetensors"))
        for key, value in unwrap_model(one).named_parameters():
            assert_equal(value, expected[key], f"{name}, saved: {key}")


def average_after_each_pass() -> list[torch.Tensor]:
    """The gradients of two batches in stages of a pipeline, averaged after each."""
    with ParallelMesh(dp=2, ep=2) as mesh:
        model = model_of(mesh)
        averager = GradientAverager([model], mesh, DDPConfig())
        for batch in BATCHES[:2]:
            model(batch.chunk(2)[mesh.rank("dp")]).square().mean().backward()
            averager.average()
        grads = [copy_placement(each.grad, each) for each in model.parameters()]
        return [full_tensor_of(each).clone() for each in grads]


def test_gradients_that_add_up_are_averaged_after_each_pass() -> None:
    model = model_of(None)
    for batch in BATCHES[:2]:
        model(batch).square().mean().backward()
    for grads in run_processes(average_after_each_pass, 2):
        for (name, parameter), grad in zip(model.named_parameters(), grads, strict=True):
            assert_equal(grad, parameter.grad, name)


def find_replicas(sizes: dict[str, int]) -> tuple[Any, ...]:
    with ParallelMesh(**sizes) as mesh:
        model, folded = model_of(mesh), mesh.fold_sp_into_dp()
        linear, experts = replicas_of(model[0].weight, folded), replicas_of(model[1].table, folded)
        assert linear == Replicas(folded)
        return [dist.get_process_group_ranks(each.group) for each in (linear, experts)], experts.num_means


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp": 4, "ep": 2}, ([[0, 1, 2, 3], [0, 2]], 4)),
        ({"dp": 2, "tp": 2, "ep": 2}, ([[0, 2], [0, 2]], 2)),
        ({"dp": 2, "tp": 2, "ep": 4}, ([[0, 2], [0]], 2)),
        ({"dp": 2, "sp": 2, "ep": 2}, ([[0, 1, 2, 3], [0, 2]], 4)),
        ({"pp": 2, "dp": 2, "ep": 2}, ([[0, 1], [0]], 2)),
    ],
    ids=str,
)
def test_replicas_are_those_with_the_same_shard(sizes: dict[str, int], expected: tuple[Any, ...]) -> None:
    assert run_processes(find_replicas, 4, sizes)[0] == expected
