"""Positions that begin anew within a row are several sequences where they are for one process, and only there."""

from typing import Any

import pytest
import torch
from families import LENGTH, build, inputs_of

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import UnsupportedError
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import run_processes

CALLS: dict[str, dict[str, Any]] = {"default": {}, "without cache": {"use_cache": False}, "cache": {"use_cache": True}}

CASES = [("default", True), ("default", False), ("without cache", True), ("cache", False)]


def batch_of(call: str) -> dict[str, Any]:
    positions = torch.tensor([*range(5), *range(LENGTH - 5)]).expand(2, -1).contiguous()
    return inputs_of("llama") | {"position_ids": positions} | CALLS[call]


def model_of(name: str, config: bool) -> Any:
    model: Any = build(name)
    model.config.use_cache = config
    return model


def sharded_losses(name: str, mode: Any) -> dict[tuple[str, bool], torch.Tensor]:
    with ParallelMesh(sp=2) as mesh:
        former = ShardFormer(ShardConfig(mesh, enable_sequence_parallelism=True, sequence_parallelism_mode=mode))
        models = {case: former.optimize(model_of(name, case[1]))[0] for case in CASES}
        return {case: model(**batch_of(case[0])).loss.detach() for case, model in models.items()}


def pipelined_losses(name: str) -> dict[tuple[str, bool], torch.Tensor]:
    found = {}
    for call, config in CASES:
        plugin = HybridParallelPlugin(1, 2, precision="fp32", num_microbatches=1)
        booster = Booster(device="cpu", plugin=plugin)
        model, *_ = booster.boost(model_of(name, config))
        batch = iter([batch_of(call)])
        found[call, config] = booster.execute_pipeline(batch, model, lambda out, _: out.loss)["loss"]
    return found


def all_losses(name: str) -> dict[str, dict[tuple[str, bool], torch.Tensor]]:
    modes = {mode: sharded_losses(name, mode) for mode in ("all_to_all", "ring_attn")}
    return modes | {"stages": pipelined_losses(name)}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_equal_to_one_process(name: str) -> None:
    expected = {(call, config): model_of(name, config)(**batch_of(call)).loss.detach() for call, config in CASES}
    assert expected["default", True] == expected["cache", False] != expected["without cache", True]
    for rank in run_processes(all_losses, 2, name):
        for way, found in rank.items():
            for case, loss in found.items():
                assert loss.item() == pytest.approx(expected[case].item(), rel=1e-6), (way, case)


def losses_with_given_mask(is_boolean: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("all_to_all", "ring_attn"):
        with ParallelMesh(sp=2) as mesh:
            former = ShardFormer(ShardConfig(mesh, enable_sequence_parallelism=True, sequence_parallelism_mode=mode))
            model, _ = former.optimize(build("llama"))
            try:
                loss = model(**inputs_with_mask(is_boolean)).loss
                loss.backward()
                found[mode] = loss.detach()
            except UnsupportedError as error:
                found[mode] = str(error)
    return found


def inputs_with_mask(is_boolean: bool) -> dict[str, torch.Tensor]:
    """Two sequences in a row, in a mask of all queries and keys, which the second row has in other places."""
    starts = torch.tensor([[5], [7]])
    parts = (torch.arange(LENGTH) >= starts).long()
    seen = (parts[:, :, None] == parts[:, None]) & torch.ones(LENGTH, LENGTH).tril().bool()
    mask = seen[:, None] if is_boolean else torch.where(seen, 0.0, -torch.inf).double()[:, None]
    return inputs_of("llama") | {"attention_mask": mask}


def test_masks_of_all_queries_and_keys() -> None:
    expected = build("llama")(**inputs_with_mask(True)).loss.detach()
    assert not torch.isclose(expected, build("llama")(**inputs_of("llama")).loss.detach())
    for rank in run_processes(losses_with_given_mask, 2, True):
        for mode, loss in rank.items():
            assert isinstance(loss, torch.Tensor), f"{mode}: {loss}"
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, msg=mode)
    for rank in run_processes(losses_with_given_mask, 2, False):
        assert "Pass booleans" in rank["ring_attn"]
