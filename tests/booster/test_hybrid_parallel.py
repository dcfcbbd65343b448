# pyright: reportArgumentType=false
"""Tensor, pipeline and data parallelism together equal one process: losses, norms, parameters after several steps."""

from functools import cache
from typing import Any

import pytest
import torch
from chosen import chosen
from divided import whole_parameters
from equality import ATOL, RTOL, assert_equal
from families import EXPERTS, LENGTH, build, inputs_of
from float64 import KeepFloat64
from torch import nn

from colossal._src.shardformer.shard_config import MODES_OF_TP
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.testing import run_processes

STEPS, MAX_NORM, BATCH = 3, 0.05, 4
ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
FAMILIES = ("llama", "llama-tied", "gpt2", "bert", "vit", "mixtral", "bloom", "t5", "blip-2-t5")
CAUSAL = ("llama", "llama-tied", "gpt2", "bloom", *EXPERTS)
OF_SEQUENCES = ("llama", "llama-tied", "gpt2", "bert", "mixtral")


def sequences(mode: str) -> dict[str, Any]:
    return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}


WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp_size": 2, "pp_size": 1}),
    "pp2": (2, {"tp_size": 1, "pp_size": 2, "num_microbatches": 2}),
    "dp2": (2, {"tp_size": 1, "pp_size": 1}),
    "pp2-v": (2, {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 2}),
    "tp2-pp2": (4, {"tp_size": 2, "pp_size": 2, "microbatch_size": 2}),
    "tp2-dp2": (4, {"tp_size": 2, "pp_size": 1}),
    "tp2-dp2-zero1": (4, {"tp_size": 2, "pp_size": 1, "zero_stage": 1, "overlap_allgather": True}),
    "tp2-dp2-zero2": (4, {"tp_size": 2, "pp_size": 1, "zero_stage": 2, "dp_outside": False}),
    "pp2-dp2": (4, {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "ddp_bucket_cap_mb": 0.05}),
    "tp2-split": (2, {"tp_size": 2, "pp_size": 1, **sequences("split_gather")}),
    "tp2-ring": (2, {"tp_size": 2, "pp_size": 1, "sp_size": 2, **sequences("ring")}),  # sp_size has no effect
    "sp2-heads": (2, {"tp_size": 1, "pp_size": 1, "sp_size": 2, **sequences("all_to_all")}),
    "sp2-ring": (2, {"tp_size": 1, "pp_size": 1, "sp_size": 2, **sequences("ring_attn")}),
    "tp2-sp2": (4, {"tp_size": 2, "pp_size": 1, "sp_size": 2, **sequences("all_to_all")}),
    "tp2-split-pp2": (4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, **sequences("split_gather")}),
    "pp2-sp2": (4, {"tp_size": 1, "pp_size": 2, "sp_size": 2, "num_microbatches": 2, **sequences("ring_attn")}),
    "sp2-dp2-zero1": (4, {"tp_size": 1, "pp_size": 1, "sp_size": 2, "zero_stage": 1, **sequences("all_to_all")}),
    "tp2-sp2-dp2": (8, {"tp_size": 2, "pp_size": 1, "sp_size": 2, **sequences("all_to_all")}),
    "pp2-dp2-zero1": (4, {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "zero_stage": 1, "dp_outside": False}),
    "ep2": (2, {"tp_size": 1, "pp_size": 1, "ep_size": 2}),
    "ep2-gather": (2, {"tp_size": 1, "pp_size": 1, "ep_size": 2, "expert_exchange": "all_gather"}),
    "pp2-tp2-ep2-gather": (
        4,
        {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "ep_size": 2, "expert_exchange": "all_gather"},
    ),
    "ep4-zero1": (4, {"tp_size": 1, "pp_size": 1, "ep_size": 4, "zero_stage": 1}),
    "ep2-dp4-zero2": (4, {"tp_size": 1, "pp_size": 1, "ep_size": 2, "zero_stage": 2, "dp_outside": False}),
    "tp2-ep2": (2, {"tp_size": 2, "pp_size": 1, "ep_size": 2}),
    "tp2-dp2-ep4": (4, {"tp_size": 2, "pp_size": 1, "ep_size": 4}),
    "tp2-dp2-ep2-zero1": (4, {"tp_size": 2, "pp_size": 1, "ep_size": 2, "zero_stage": 1}),
    "tp4-ep2": (4, {"tp_size": 4, "pp_size": 1, "ep_size": 2}),
    "tp4-ep2-zero1": (4, {"tp_size": 4, "pp_size": 1, "ep_size": 2, "zero_stage": 1}),
    "tp2-split-ep2": (2, {"tp_size": 2, "pp_size": 1, "ep_size": 2, **sequences("split_gather")}),
    "sp2-ep2": (2, {"tp_size": 1, "pp_size": 1, "sp_size": 2, "ep_size": 2, **sequences("all_to_all")}),
    "pp2-ep2": (4, {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "ep_size": 2}),
    "pp2-tp2-ep2": (4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "ep_size": 2}),
    "pp2-ep2-v": (
        4,
        {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "ep_size": 2, "pp_style": "zbv", "num_model_chunks": 2},
    ),
    "tp2-pp2-ep4-zero1": (8, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "ep_size": 4, "zero_stage": 1}),
}
WITH_ALL_FAMILIES = ("tp2", "pp2", "tp2-pp2", "tp2-split", "tp2-ring", "sp2-heads", "sp2-ring")
WITH_ALL_EXPERTS = (
    "ep2",
    "ep2-gather",
    "tp2-ep2",
    "ep4-zero1",
    "ep2-dp4-zero2",
    "tp2-dp2-ep4",
    "pp2-ep2",
    "pp2-tp2-ep2",
)


def batch_of(name: str, step: int) -> dict[str, torch.Tensor]:
    """Four samples: two as `inputs_of` makes them, and two others."""
    pairs = [inputs_of(name, num_changed=each) for each in (step, step + 4)]
    return {key: torch.cat([pair[key] for pair in pairs]) for key in pairs[0]}


def loss_of(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.loss


def families_of(world: str) -> list[str]:
    """All where one axis or tp x pp divides the model, else some; with 8 ranks on few cores one is enough."""
    size, options = WORLDS[world]
    if "ep_size" in options:
        return list(EXPERTS) if world in WITH_ALL_EXPERTS else ["mixtral"]
    families = OF_SEQUENCES if "enable_sequence_parallelism" in options else FAMILIES
    if world in WITH_ALL_FAMILIES:
        return list(families)
    return ["llama-tied", *chosen([name for name in families if name != "llama-tied"], 2 if size < 8 else 0, world)]


def train(world: str, families: list[str]) -> dict[str, Any]:
    """Train models of some families in one world."""
    options = WORLDS[world][1]
    with KeepFloat64():
        return {
            name: train_one(name, options) | {"sees": seen_of_the_future(name, options) if name in CAUSAL else None}
            for name in families
        }


@torch.no_grad()
def seen_of_the_future(name: str, options: dict[str, Any]) -> list[bool] | None:
    """Change the last token, and tell of each token whether its logits are other ones; None on ranks without any."""
    plugin = HybridParallelPlugin(precision="fp32", parallel_output=False, **options)
    booster = Booster(plugin=plugin)
    model, *_ = booster.boost(build(name, num_layers=4))
    logits = []
    for number in (0, 1):
        pair = [inputs_of(name, num_changed=number)] * 2
        batch = {key: torch.cat([each[key] for each in pair]) for key in pair[0]}
        if plugin.pp_size == 1:
            logits.append(model(**batch).logits)
        else:
            done = booster.execute_pipeline(iter([batch]), model, loss_of, return_outputs=True)
            logits.append(done["outputs"].logits if done["outputs"] is not None else None)
    return None if logits[0] is None else ((logits[0] - logits[1]).abs() > ATOL).any(-1).any(0).tolist()


def train_one(name: str, options: dict[str, Any]) -> dict[str, Any]:
    plugin = HybridParallelPlugin(precision="fp32", max_norm=MAX_NORM, **options)
    booster = Booster(plugin=plugin)
    model: nn.Module = build(name, num_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, loss_of)
    rank, size = plugin.data_parallel_rank_and_size()
    losses, norms = [], []
    for step in range(STEPS):
        batch = {key: value.chunk(size)[rank] for key, value in batch_of(name, step).items()}
        if plugin.pp_size > 1:
            loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]
        else:
            loss = criterion(model(**batch))
            booster.backward(loss, optimizer)
        norms.append(optimizer.get_grad_norm())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.state_dict()  # waits for parameters that are still being gathered
    return {"losses": losses, "norms": norms, "parameters": whole_parameters(model.unwrap(), plugin.mesh), "dp": rank}


@cache
def alone(name: str, num_parts: int) -> dict[str, Any]:
    model = build(name, num_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(STEPS):
        batch, parts = batch_of(name, step), []
        for index in range(num_parts):
            with KeepFloat64():
                loss = model(**{key: value.chunk(num_parts)[index] for key, value in batch.items()}).loss
            (loss / num_parts).backward()
            parts.append(loss.detach())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parts)
    return {"losses": losses, "norms": norms, "parameters": dict(model.named_parameters(remove_duplicate=False))}


# Of sharded sequences, `test_sequence.py` compares gradients of all families, and the equality matrix steps of one.
IN_GATE = ("pp2-v", "tp2-dp2-zero1", "ep2")


@pytest.fixture(
    scope="module", params=[each if each in IN_GATE else pytest.param(each, marks=pytest.mark.slow) for each in WORLDS]
)
def world(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    size, _ = WORLDS[request.param]
    return request.param, run_processes(train, size, request.param, families_of(request.param))


@pytest.mark.chosen
def test_equals_one_process(world) -> None:
    label, ranks = world
    for name in families_of(label):
        check(name, label, ranks)
        seen = [rank[name]["sees"] for rank in ranks if rank[name]["sees"] is not None]
        assert all(each == [False] * (LENGTH - 1) + [True] for each in seen)
        assert bool(seen) == (name in CAUSAL)


def check(name: str, label: str, ranks: list[dict[str, Any]]) -> None:
    size, options = WORLDS[label]
    sp = 1 if options.get("sequence_parallelism_mode") in MODES_OF_TP else options.get("sp_size", 1)
    dp = size // options["tp_size"] // options["pp_size"] // sp
    parts = 2 if options["pp_size"] == 2 else 1
    expected = alone(name, dp * parts)
    found: dict[str, torch.Tensor] = {}
    for rank in (each[name] for each in ranks):
        for step in range(STEPS):
            own = expected["losses"][step][rank["dp"] * parts :][:parts]
            assert_equal(rank["losses"][step], sum(own) / parts, f"{label}, {name}: loss of step {step}")
            assert rank["norms"][step] == pytest.approx(float(expected["norms"][step]), rel=RTOL)
        for key, value in rank["parameters"].items():
            if key in found:
                torch.testing.assert_close(found[key], value, rtol=0, atol=0)
        found |= rank["parameters"]
    assert found.keys() == expected["parameters"].keys()
    for key, value in expected["parameters"].items():
        assert_equal(found[key], value.detach(), f"{label}, {name}: {key}")
