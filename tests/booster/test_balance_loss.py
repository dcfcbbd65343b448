# pyright: reportArgumentType=false, reportCallIssue=false
"""The loss that balances experts is that of the joined batch of all ranks."""

from typing import Any

import pytest
import torch
from equality import RTOL
from families import EXPERTS, build, inputs_of
from float64 import KeepFloat64
from plugins import plugins

from colossal._src.interface import unwrap_model
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.errors import UnsupportedError
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import assert_equal_to_one_process, run_processes

FAMILIES = [name for name in EXPERTS if name != "deepseek"]  # which has a bias instead
SP = {"enable_sequence_parallelism": True}
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2-zero2": (2, {"zero_stage": 2}),
    "ep2": (2, {"ep_size": 2}),
    "tp2": (2, {"tp_size": 2}),
    "sp2": (2, SP | {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}),
    "split_gather": (2, SP | {"tp_size": 2, "sequence_parallelism_mode": "split_gather"}),
    "dp2-sp2-ep2": (4, SP | {"sp_size": 2, "ep_size": 2, "sequence_parallelism_mode": "all_to_all"}),
    "dp2-split_gather-ep4": (4, SP | {"tp_size": 2, "ep_size": 4, "sequence_parallelism_mode": "split_gather"}),
}
PLUGINS = plugins("DDP", "ZeRO-1", "ZeRO-2", "Gemini")
COEFFICIENT = 0.7
STEPS = 2


def batch_of(step: int, is_padded: bool, part: int = 0, parts: int = 1) -> dict[str, torch.Tensor]:
    pairs = [inputs_of("mixtral", num_changed=each) for each in (step, step + 4)]
    # transformers counts tokens in float32: of a power of two, shares are exact
    batch = {key: torch.cat([pair[key] for pair in pairs])[:, -8:] for key in pairs[0]}
    if is_padded:  # labels are of the same number on all ranks
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        for row, length in enumerate((8, 3, 4, 1)):
            batch["attention_mask"][row, length:] = 0
    return {key: value.chunk(parts)[part] for key, value in batch.items()}


def train(name: str, plugin: Any, is_padded: bool) -> tuple[list[tuple[float, float]], Any]:
    part, parts = (0, 1) if plugin is None else plugin.data_parallel_rank_and_size()
    model: Any = build(name)
    model.router_aux_loss_coef = COEFFICIENT
    booster = Booster(device="cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[tuple[float, float]] = []
    for step in range(STEPS):
        with KeepFloat64():
            outputs = model(**batch_of(step, is_padded, part, parts), output_router_logits=True)
            booster.backward(outputs.loss, optimizer)
        found.append((outputs.aux_loss.item(), float(optimizer.clip_grad_by_norm(1.0))))
        optimizer.step()
        optimizer.zero_grad()
    return found, model


def train_sharded(
    name: str, options: dict[str, Any], is_padded: bool, expected: dict[str, torch.Tensor]
) -> list[tuple[float, float]]:
    plugin = HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32"} | options)
    found, model = train(name, plugin, is_padded)
    assert_equal_to_one_process(model, expected, atol=1e-9)
    return found


def check(name: str, world: str, is_padded: bool) -> None:
    expected, model = train(name, None, is_padded)
    after = {key: each.detach() for key, each in unwrap_model(model).named_parameters()}
    size, options = WORLDS[world]
    for found in run_processes(train_sharded, size, name, options, is_padded, after):
        for pair, values in zip(found, expected, strict=True):
            assert pair == pytest.approx(values, rel=RTOL)


@pytest.mark.parametrize(
    "world", [pytest.param(each, marks=pytest.mark.slow if WORLDS[each][0] > 2 else ()) for each in WORLDS]
)
def test_equals_one_process(world: str) -> None:
    check("mixtral", world, is_padded=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_with_padding(name: str) -> None:
    check(name, "ep2", is_padded=True)


# ------------------------------------------------------------------------------------------ without the hybrid plugin


def train_under(name: str) -> dict[str, tuple[float, int]]:
    """Train under plugins that shard no layers, with experts that are sharded, or only the loss over ranks."""
    found: dict[str, tuple[float, int]] = {}
    for sizes in ({"dp": 2}, {"dp": 2, "ep": 2}):
        for plugin, make in PLUGINS.items():
            with ParallelMesh(**sizes) as mesh:
                model: Any = ShardFormer(ShardConfig(mesh)).optimize(build(name))[0]
                model.router_aux_loss_coef = COEFFICIENT
                model, optimizer, *_ = Booster(device="cpu", plugin=make()).boost(
                    model, torch.optim.SGD(model.parameters(), lr=0.1)
                )
                batch = batch_of(0, False, mesh.rank("dp"), 2)
                with KeepFloat64(), CommCounter() as counter:
                    loss = model(**batch, output_router_logits=True).loss
                    calls = counter.calls["all_reduce", "dp"]
                    Booster(device="cpu", plugin=make()).backward(loss, optimizer)
                found[f"{plugin}, {sizes}"] = float(optimizer.clip_grad_by_norm(1.0)), calls
    return found


def test_under_plugins_that_shard_no_layers() -> None:
    expected, _ = train("mixtral", None, is_padded=False)
    for found in run_processes(train_under, 2, "mixtral"):
        assert found == {key: (pytest.approx(expected[0][1], rel=RTOL), 1) for key in found}


# ------------------------------------------------------------------------------------------ what is not balanced so


def evaluate() -> list[torch.Tensor]:
    """Without gradients, a rank may have a batch more than others."""
    plugin = HybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32")
    model = Booster(device="cpu", plugin=plugin).boost(build("mixtral").eval())[0]
    with torch.no_grad():
        return [
            model(**batch_of(step, False), output_router_logits=True).aux_loss
            for step in range(plugin.mesh.rank("dp") + 1)
        ]


def test_evaluation_is_that_of_each_rank() -> None:
    model: Any = build("mixtral")
    with torch.no_grad():
        expected = [model(**batch_of(step, False), output_router_logits=True).aux_loss for step in range(2)]
    assert run_processes(evaluate, 2) == [expected[:1], expected]


def pass_a_mask() -> str:
    plugin = HybridParallelPlugin(1, 1, precision="fp32", **WORLDS["sp2"][1])
    model = Booster(device="cpu", plugin=plugin).boost(build("mixtral"))[0]
    with pytest.raises(UnsupportedError) as error:
        model(**batch_of(0, is_padded=True), output_router_logits=True)
    return str(error.value)


def test_padding_of_sharded_sequences_is_refused() -> None:
    for message in run_processes(pass_a_mask, 2):
        assert "Found an attention_mask, which leaves some out. Leave it out of the batch" in message
