# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Outputs that a model collects from its layers are those of all layers, tokens and heads, or are refused."""

from typing import Any

import pytest
import torch
from families import build, inputs_of
from float64 import KeepFloat64

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.errors import UnsupportedError
from colossal.testing import assert_close, run_processes

PP = {"pp_size": 2, "num_microbatches": 2}
SP = {"enable_sequence_parallelism": True}
ALL = ("output_hidden_states", "output_attentions", "output_router_logits")
OTHERS = ALL[:2]  # whose loss is computed over ranks: `test_balance_loss.py`
# What shards the layers, which outputs it refuses, and how the message names it.
SHARDED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "pp": (PP, ALL, "Found a model in pipeline stages"),
    "all_to_all": (
        SP | {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
        OTHERS,
        "some of the tokens",
    ),
    "ring_attn": (SP | {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}, OTHERS, "some of the tokens"),
    "split_gather": (
        SP | {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
        OTHERS,
        "some of the tokens",
    ),
    "tp": ({"tp_size": 2}, ("output_attentions",), "some of the heads"),
}


def auxiliary_loss(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.loss + outputs.hidden_states[1].square().mean()


def boost(name: str, options: dict[str, Any]) -> tuple[Booster, Any, Any, Any]:
    model: Any = build(name)
    config = model.config
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"tp_size": 1, "pp_size": 1, "precision": "fp32"} | options
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer, config


def ask(options: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Ask for outputs by a keyword and by the configuration, and train on without them."""
    booster, model, optimizer, config = boost("mixtral", options)
    messages = list[str]()

    def step(**more: Any) -> None:
        with KeepFloat64():
            batch = iter([inputs_of("mixtral") | more])
            booster.execute_pipeline(batch, model, lambda outputs, _: outputs.loss, optimizer)

    for name in names:
        with pytest.raises(UnsupportedError) as by_keyword:
            step(**{name: True})
        messages.append(str(by_keyword.value))
        if name == "output_attentions":  # which transformers refuses for most functions of attention
            continue
        for own in (config, model.unwrap().config):  # of a pipeline another one, that of the full model
            setattr(own, name, True)
            with pytest.raises(UnsupportedError) as by_configuration:
                step()
            assert str(by_configuration.value) == messages[-1]
            step(**{name: False})  # a keyword outweighs the configuration
            setattr(own, name, False)
    step()
    return messages


@pytest.mark.parametrize("kind", SHARDED)
def test_what_a_rank_has_only_a_part_of_is_refused_on_all_ranks(kind: str) -> None:
    options, names, found = SHARDED[kind]
    first, second = run_processes(ask, 2, options, names)
    assert first == second
    for name, message in zip(names, first, strict=True):
        assert message.startswith(f"{name} collects outputs of all layers")
        assert found in message


def gradients(options: dict[str, Any], name: str, **asked: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    booster, model, optimizer, config = boost(name, options)
    config.update(asked)
    with KeepFloat64():
        outputs = model(**inputs_of(name))
        extra = outputs.aux_loss if asked.get("output_router_logits") else 0
        loss = auxiliary_loss(outputs) + extra
        booster.backward(loss, optimizer)
    norms = {key: each.grad for key, each in model.unwrap().named_parameters() if "norm" in key}
    return (loss.detach(), [each.detach() for each in outputs.hidden_states]), norms


def test_hidden_states_and_router_logits_under_tensor_parallelism_equal_one_process() -> None:
    asked = {"output_hidden_states": True, "output_router_logits": True}
    (expected,) = run_processes(gradients, 1, {}, "mixtral", **asked)
    for found in run_processes(gradients, 2, {"tp_size": 2}, "mixtral", **asked):
        assert_close(found, expected)
