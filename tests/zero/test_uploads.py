# pyright: reportArgumentType=false
"""Where the optimizer's parameters are on the host, a bucket goes to the device while Adam updates the next one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossal._src.nn.optimizer import adam
from colossal._src.zero import Bucket, Partitions, ZeroConfig, shard_optimizer
from colossal.cluster import ParallelMesh
from colossal.nn.optimizer import HybridAdam
from colossal.testing import run_threads

DEPTH, WIDTH = 3, 4
BATCHES = [torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)).double() for seed in range(3)]


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).double()


def in_one_group(model: nn.Module, **options: Any) -> HybridAdam:
    return HybridAdam(model.parameters(), lr=0.02, **options)


def in_two_groups(model: nn.Module) -> HybridAdam:
    """Weights decay and biases do not, as is usual: each bucket is complete when the second group has been updated."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [value for name, value in named.items() if ("bias" in name) == is_bias], "weight_decay": decay}
        for is_bias, decay in ((False, 0.1), (True, 0.0))
    ]
    return HybridAdam(groups, lr=0.02)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep the masters elsewhere, as on an accelerator with `cpu_offload`, and note what follows on what."""
    found: list[str] = []
    start = Bucket.start_upload

    def noted_start(self: Bucket) -> None:
        start(self)
        found.append("upload")

    monkeypatch.setattr(Bucket, "_make_master", lambda self: self.shard.clone())
    monkeypatch.setattr(Bucket, "targets", property(lambda _: {}))
    for name in ("adam_step", "_float64_step"):
        monkeypatch.setattr(adam, name, noted(getattr(adam, name), found))
    monkeypatch.setattr(Bucket, "start_upload", noted_start)
    return found


def noted(step: Callable[..., None], found: list[str]) -> Callable[..., None]:
    def new_step(*args: Any) -> None:
        step(*args)
        found.append("update")

    return new_step


def train(
    make: Callable[[nn.Module], Any], model: nn.Module, *, is_shared: bool = True, **options: Any
) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = make(model)
    if is_shared:
        mesh = ParallelMesh(dp=torch.distributed.get_world_size())
        config = ZeroConfig(bucket_numel=WIDTH * WIDTH + WIDTH, **options)
        optimizer = shard_optimizer(model, optimizer, Partitions(mesh), config)
    for batch in BATCHES:
        optimizer.zero_grad()
        loss = (model(batch) ** 2).mean()
        optimizer.backward(loss) if is_shared else loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("make", [in_one_group, in_two_groups])
def test_training_is_that_of_one_process(notes: list[str], make: Any, stage: int, size: int) -> None:
    model = model_of()
    expected = train(make, model, is_shared=False)
    notes.clear()
    for rank in run_threads(train, size, make, model, stage=stage):
        torch.testing.assert_close(rank, expected, rtol=1e-9, atol=1e-11)
    assert notes.count("upload") == DEPTH * len(BATCHES) * size


def test_a_bucket_goes_while_the_next_is_updated(notes: list[str]) -> None:
    run_threads(train, 1, in_one_group, model_of())
    assert notes == ["update", "upload"] * (DEPTH * len(BATCHES))


def test_a_bucket_goes_when_all_groups_are_updated(notes: list[str]) -> None:
    run_threads(train, 1, in_two_groups, model_of())
    assert notes == (["update"] * DEPTH + ["update", "upload"] * DEPTH) * len(BATCHES)


def test_what_is_on_a_disk_goes_after_the_step(notes: list[str], tmp_path: Any) -> None:
    """Its pieces are not told of, as a bucket may have further ones."""
    model = model_of().float()
    optimizer = in_one_group(model, nvme_offload_fraction=1.0, nvme_offload_dir=str(tmp_path))

    def step() -> None:
        mesh = ParallelMesh(dp=1)
        shards = shard_optimizer(model, optimizer, Partitions(mesh), ZeroConfig(bucket_numel=20))
        shards.backward(model(BATCHES[0].float()).sum())
        shards.step()

    run_threads(step, 1)
    first = notes.index("upload")
    assert set(notes[:first]) == {"update"}
    assert notes[first:] == ["upload"] * DEPTH
