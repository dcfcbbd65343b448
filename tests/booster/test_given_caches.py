# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Keys and values of earlier tokens that a program gives to a model are attended to, or refused on all ranks."""

from typing import Any

import pytest
import torch
from families import build, inputs_of
from float64 import KeepFloat64
from transformers import DynamicCache

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.errors import UnsupportedError
from colossal.testing import reuse_processes, run_processes

SP = {"enable_sequence_parallelism": True, "sp_size": 2}
WORLDS: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "split_gather": {"tp_size": 2, "enable_sequence_parallelism": True},
    "all_to_all": SP | {"sequence_parallelism_mode": "all_to_all"},
    "ring_attn": SP | {"sequence_parallelism_mode": "ring_attn"},
    "pp": {"pp_size": 2, "num_microbatches": 2},
}
REFUSED = {  # what a rank has some of
    "all_to_all": "some of the tokens on each rank",
    "ring_attn": "some of the tokens on each rank",
    "pp": "in pipeline stages",
}


def prefix(model: Any) -> DynamicCache:
    """Return keys and values of three tokens, of all heads, as prefix tuning makes them."""
    config = model.config
    shape = (2, config.num_key_value_heads, 3, config.hidden_size // config.num_attention_heads)
    return DynamicCache([(torch.ones(shape).double(), torch.ones(shape).double())] * config.num_hidden_layers)


def losses(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Call a model twice, the second time with what the first call kept, and with an empty cache."""
    kept = model(input_ids=ids[:, :8], use_cache=True).past_key_values
    later = model(input_ids=ids[:, 8:], labels=ids[:, 8:], past_key_values=kept).loss
    return [later, model(input_ids=ids, labels=ids, past_key_values=DynamicCache()).loss]


def call(world: str) -> tuple[list[torch.Tensor] | str, str]:
    """Return losses with the model's own cache, or why it is refused, and the error of a cache of the program."""
    plugin = HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32"} | WORLDS[world])
    own, ids = build("llama"), inputs_of("llama")["input_ids"]
    past = prefix(own)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    found: Any
    with KeepFloat64():
        try:
            found = "" if world == "pp" else [each.detach() for each in losses(model, ids)]
        except UnsupportedError as error:
            found = str(error)
        batch = {"input_ids": ids, "labels": ids, "past_key_values": past}
        with pytest.raises(UnsupportedError) as refused:
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
    return found, str(refused.value)


@pytest.mark.parametrize("world", [pytest.param(each, marks=pytest.mark.slow) for each in WORLDS])
def test_a_given_cache_counts_or_is_refused(world: str) -> None:
    ids = inputs_of("llama")["input_ids"]
    with KeepFloat64():
        expected = losses(build("llama"), ids)
    with reuse_processes():
        ranks = run_processes(call, 2, world)
    for found, refused in ranks:
        assert "past_key_values with" in refused
        assert REFUSED.get(world, "some of the heads on each rank") in refused
        if world in ("all_to_all", "ring_attn"):
            assert found == refused
        elif world != "pp":
            for loss, own in zip(found, expected, strict=True):
                torch.testing.assert_close(torch.as_tensor(loss), own.detach(), rtol=1e-9, atol=0)
