# pyright: reportArgumentType=false
"""Over an epoch, metrics see every sample once, on any number of ranks and under every plugin."""

from functools import partial
from typing import Any

import pytest
import torch
from families import build, inputs_of
from plugins import plugins
from torch.utils.data import DataLoader, TensorDataset

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError
from colossal.testing import run_processes, run_threads

FAMILY = "llama-tied"
HYBRID = partial(HybridParallelPlugin, precision="fp32", parallel_output=False)
WORLDS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": (
        {"dp": 2},
        plugins("DDP", "FSDP", "ZeRO-2", "Gemini"),
    ),
    "tp2": ({"tp": 2}, {"Hybrid": partial(HYBRID, 2, 1)}),
    "sp2": ({"sp": 2}, {"Hybrid": partial(HYBRID, 1, 1, 2, enable_sequence_parallelism=True)}),
    "pp2 x dp2": ({"pp": 2, "dp": 2}, {"Hybrid": partial(HYBRID, 1, 2, num_microbatches=1)}),
}
NUM_SAMPLES, BATCH = 7, 4


def samples() -> dict[str, torch.Tensor]:
    inputs = [inputs_of(FAMILY, num_changed=3 * number) for number in range(4)]
    return {name: torch.cat([each[name] for each in inputs])[:NUM_SAMPLES] for name in inputs[0]}


def loader_of(booster: Booster, *columns: torch.Tensor, **options: Any) -> "DataLoader[Any]":
    size = booster.plugin.data_parallel_rank_and_size()[1]
    return booster.plugin.prepare_dataloader(TensorDataset(*columns), BATCH // size, **options)


def predictions(booster: Booster) -> torch.Tensor:
    """The loop of somebody who evaluates, the same under every plugin."""
    columns, found = samples(), []
    boosted: Any = booster.boost(build(FAMILY))
    model, loader = boosted[0].eval(), loader_of(booster, *columns.values())
    for batch in loader:
        with torch.no_grad():
            inputs = dict(zip(columns, batch, strict=True))
            done = booster.execute_pipeline(iter([inputs]), model, lambda out, _: out.loss, return_outputs=True)
        outputs = done["outputs"]
        values = {"logits": outputs and outputs.logits, "labels": inputs["labels"]}
        values = booster.gather_for_metrics(values, loader)
        torch.testing.assert_close(values["labels"], columns["labels"][sum(map(len, found)) :][: len(values["labels"])])
        found.append(values["logits"])
    return torch.cat(found)


def compare(world: str, expected: torch.Tensor) -> None:
    axes, plugins = WORLDS[world]
    with ParallelMesh(**axes):
        for plugin in plugins.values():
            torch.testing.assert_close(predictions(Booster(plugin=plugin(), device="cpu")), expected)


@pytest.mark.parametrize("world", WORLDS)
def test_predictions_are_those_of_one_process(world) -> None:
    expected = predictions(Booster(device="cpu"))
    assert len(expected) == NUM_SAMPLES
    size = 4 if " x " in world else 2
    run_processes(compare, size, world, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_sample_comes_once_and_in_order(size, drop_last) -> None:
    numbers = torch.arange(11)

    def program() -> list[int]:
        with ParallelMesh(dp=size):
            booster = Booster(plugin=TorchDDPPlugin(), device="cpu")
            loader = booster.plugin.prepare_dataloader(TensorDataset(numbers), 2, drop_last=drop_last)
            found = [torch.cat([booster.gather_for_metrics(x, loader) for (x,) in loader]) for _ in range(2)]
            assert found[0].equal(found[1])
            return found[0].tolist()

    expected = numbers[: 11 // (2 * size) * 2 * size] if drop_last else numbers
    assert run_threads(program, size) == [expected.tolist()] * size


def test_a_loader_that_resumes_leaves_out_what_it_repeats() -> None:
    def program() -> list[int]:
        with ParallelMesh(dp=2):
            booster = Booster(plugin=TorchDDPPlugin(), device="cpu")
            loader: Any = booster.plugin.prepare_dataloader(TensorDataset(torch.arange(11)), 2, shuffle=True)
            loader.load_state_dict({"epoch": 1, "samples": 4})
            return torch.cat([booster.gather_for_metrics(x, loader) for (x,) in loader]).tolist()

    order = torch.randperm(11, generator=torch.Generator().manual_seed(1024 + 1)).tolist()
    assert run_threads(program, 2) == [order[4:]] * 2


def refused(values: Any, match: str, **axes: int) -> None:
    def program() -> None:
        with ParallelMesh(**axes) as mesh:
            booster = Booster(plugin=TorchDDPPlugin() if "dp" in axes else HYBRID(2, 1), device="cpu")
            loader = loader_of(booster, torch.arange(4))
            for _ in loader:
                with pytest.raises(ConfigError, match=match):
                    booster.gather_for_metrics(values(mesh), loader)

    run_threads(program, 2)


def test_a_pipeline_that_returns_no_outputs_is_refused() -> None:
    def program() -> None:
        with ParallelMesh(pp=2):
            booster = Booster(plugin=HYBRID(1, 2, num_microbatches=1), device="cpu")
            loader = loader_of(booster, torch.arange(4))
            for _ in loader:
                with pytest.raises(ConfigError, match="return_outputs=True"):
                    booster.gather_for_metrics(None, loader)

    run_threads(program, 2)


def test_what_has_no_samples_is_refused() -> None:
    refused(lambda _: torch.tensor(0.5), "mean loss", dp=2)


def test_unequal_lengths_are_refused_on_all_ranks() -> None:
    refused(lambda mesh: torch.zeros(2, 3 + mesh.rank("dp")), r"padded to one length", dp=2)


def test_shards_of_logits_are_refused() -> None:
    refused(lambda mesh: torch.full((2, 3), mesh.rank("tp")), "parallel_output=False", tp=2)


def test_another_loader_is_refused() -> None:
    booster = Booster(device="cpu")
    with pytest.raises(ConfigError, match="prepare_dataloader"):
        booster.gather_for_metrics(torch.zeros(2), DataLoader(TensorDataset(torch.zeros(4)), 2))
