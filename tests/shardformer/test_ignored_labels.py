"""Labels of -100 in uneven places, or everywhere: losses and every gradient are those of one process."""

from typing import Any

import pytest
import torch
from divided import assert_grads, whole_grads
from equality import assert_equal
from families import LENGTH, build, inputs_of, results_of

from colossal.cluster import ParallelMesh
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import run_processes

NAMES = ("llama", "gpt2", "bert")
SEQUENCES = {"enable_sequence_parallelism": True}
WORLDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2": ({"tp": 2}, {}),
    "split_gather": ({"tp": 2}, SEQUENCES | {"sequence_parallelism_mode": "split_gather"}),
    "ring": ({"tp": 2}, SEQUENCES | {"sequence_parallelism_mode": "ring"}),
    "all_to_all": ({"sp": 2}, SEQUENCES | {"sequence_parallelism_mode": "all_to_all"}),
    "ring_attn": ({"sp": 2}, SEQUENCES | {"sequence_parallelism_mode": "ring_attn"}),
}
IGNORED: dict[str, Any] = {
    "uneven": [(0, slice(0, 7)), (1, slice(3, 4)), (1, slice(10, LENGTH))],
    "the first half, so that one rank of all_to_all has none": [(slice(None), slice(0, LENGTH // 2 + 1))],
    "all": [(slice(None), slice(None))],
}


def batch_of(name: str, ignored: str) -> dict[str, torch.Tensor]:
    batch = inputs_of(name)
    labels = batch["labels"].clone()
    for where in IGNORED[ignored]:
        labels[where] = -100
    return batch | {"labels": labels}


def train(world: str) -> dict[Any, tuple[torch.Tensor, dict[str, Any]]]:
    axes, options = WORLDS[world]
    mesh, found = ParallelMesh(**axes), {}
    for name in NAMES:
        for ignored in IGNORED:
            for parallel_output in (True, False):
                config = ShardConfig(mesh, parallel_output=parallel_output, **options)
                model, _ = ShardFormer(config).optimize(build(name, num_layers=1))
                loss, _ = results_of(model, batch_of(name, ignored))
                loss.backward()
                found[name, ignored, parallel_output] = loss.detach(), whole_grads(model, mesh)
    return found


@pytest.mark.parametrize(
    "world", [pytest.param(each, marks=pytest.mark.slow if each == "ring" else ()) for each in WORLDS]
)
def test_a_step_is_that_of_one_process(world: str) -> None:
    expected = {}
    for name in NAMES:
        for ignored in IGNORED:
            model = build(name, num_layers=1)
            loss, _ = results_of(model, batch_of(name, ignored))
            loss.backward()
            expected[name, ignored] = loss.detach(), model
    for rank in run_processes(train, 2, world):
        for (name, ignored, parallel_output), (loss, grads) in rank.items():
            at = f"{world}, {name}, {ignored}, parallel_output={parallel_output}: "
            wanted, model = expected[name, ignored]
            if ignored == "all":
                assert loss.isnan(), f"{at}one process has no mean of nothing either"
                assert wanted.isnan()
            else:
                assert_equal(loss, wanted, f"{at}loss")
            assert_grads(grads, model, at)
