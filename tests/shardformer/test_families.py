"""Tensor parallelism against one process: loss, logits, every gradient, and that no token sees those behind it."""

import copy
from typing import Any

import pytest
import torch
from chosen import chosen
from divided import assert_grads, whole_grads
from equality import assert_equal
from families import LENGTH, MODELS, NOT_CAUSAL, build, inputs_of, results_of
from torch import nn

from colossal.cluster import ParallelMesh
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import run_threads


def train_sharded(name: str, model: nn.Module, size: int, parallel_output: bool) -> dict[str, Any]:
    """Run a step of a divided copy, and forward once more with another last token."""
    with ParallelMesh(tp=size) as mesh:
        sharded, _ = ShardFormer(ShardConfig(mesh, parallel_output=parallel_output)).optimize(copy.deepcopy(model))
        loss, logits = results_of(sharded, inputs_of(name))
        loss.backward()
        with torch.no_grad():
            _, changed = results_of(sharded, inputs_of(name, num_changed=1))
        numel = sum(parameter.numel() for parameter in sharded.parameters())
        grads = whole_grads(sharded, mesh)
    return {
        "loss": loss.detach(),
        "logits": logits.detach(),
        "changed": changed,
        "grads": grads,
        "numel": numel,
    }


def check(name: str, size: int, attention: str, parallel_output: bool) -> None:
    model = build(name, attention)
    alone = copy.deepcopy(model)
    loss, logits = results_of(alone, inputs_of(name))
    loss.backward()
    ranks = run_threads(train_sharded, size, name, model, size, parallel_output)
    for found in ranks:
        assert_equal(found["loss"], loss.detach(), "loss")
        if name not in NOT_CAUSAL:
            before = found["logits"][..., : LENGTH - 1, :]
            torch.testing.assert_close(found["changed"][..., : LENGTH - 1, :], before, rtol=0, atol=1e-12)
        assert_grads(found["grads"], alone)
    joined = [found["logits"] for found in ranks]
    whole = joined[0] if joined[0].shape == logits.shape else torch.cat(joined, -1)
    assert_equal(whole, logits.detach(), "logits")
    total = sum(parameter.numel() for parameter in alone.parameters())
    assert all(found["numel"] < 0.8 * total for found in ranks), "hardly anything was divided"


WITH_EAGER = [*(name for name in MODELS if name not in NOT_CAUSAL), "sam", "blip-2-t5"]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_one_process(name: str, size: int) -> None:
    check(name, size, "sdpa", parallel_output=True)


@pytest.mark.chosen
@pytest.mark.parametrize("name", chosen(WITH_EAGER, 13, "families with eager attention"))
def test_eager_attention_and_whole_logits(name: str) -> None:
    check(name, 2, "eager", parallel_output=False)
