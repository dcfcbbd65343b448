# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Half of a family with two lists of layers, such as an encoder by itself, in a pipeline: equal to one process."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from equality import assert_equal
from families import LENGTH, T5, VOCAB, WHISPER
from float64 import KeepFloat64
from torch import nn

from colossal._src.tensor import copy_placement
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import PlanError
from colossal.pipeline import count_layers
from colossal.shardformer import plan_of
from colossal.tensor import Stages, full_tensor_of
from colossal.testing import run_processes

INTERLEAVED = {"pp_style": "interleaved", "num_model_chunks": 2}
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks of tp, and the schedule
    "pp2": (1, {}),
    "pp2, interleaved": (1, INTERLEAVED),
    "pp2 x tp2": (2, {}),
    "pp2 x tp2, interleaved": (2, INTERLEAVED),
}
SIMPLER = ("pp2", "pp2 x tp2, interleaved")  # each half of which another has
NUM_LAYERS = 5
OF_T5 = T5 | {"num_layers": NUM_LAYERS, "pad_token_id": 0}
OF_WHISPER = WHISPER | {"encoder_layers": NUM_LAYERS, "decoder_layers": NUM_LAYERS}
MODELS: dict[str, dict[str, Any]] = {
    "T5EncoderModel": OF_T5,
    "MT5EncoderModel": OF_T5,
    "UMT5EncoderModel": OF_T5,
    "T5ForTokenClassification": OF_T5,
    "WhisperForAudioClassification": OF_WHISPER,
    "WhisperForCausalLM": OF_WHISPER,
}


def build(name: str) -> nn.Module:
    kind: Any = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(kind.config_class(**MODELS[name])).double()


def batch_of(name: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (4, LENGTH), generator=draw)
    mask = (torch.arange(LENGTH) < torch.tensor([[12], [9], [5], [11]])).long()
    if name == "WhisperForAudioClassification":
        return {"input_features": torch.randn(4, 16, 64, generator=draw).double(), "labels": torch.arange(4) % 2}
    if name == "WhisperForCausalLM":
        return {"input_ids": ids, "labels": ids}
    labels = {"labels": ids % 2} if name == "T5ForTokenClassification" else {}
    return {"input_ids": ids, "attention_mask": mask, **labels}


def loss_of(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.last_hidden_state.square().mean() if "last_hidden_state" in outputs else outputs.loss


def step(name: str, plugin: HybridParallelPlugin | None) -> dict[str, Any]:
    """Outputs, the loss and every gradient of one step, and parameters after it."""
    booster, model = Booster(device="cpu", plugin=plugin), build(name)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, criterion, *_ = booster.boost(model, sgd, loss_of)
    with KeepFloat64():
        done = booster.execute_pipeline(iter([batch_of(name)]), boosted, criterion, optimizer, return_outputs=True)
    grads = {
        optimizer.param_names[each]: full_tensor_of(copy_placement(each.grad.detach(), each)).clone()
        for each in optimizer.parameters
        if each.grad is not None
    }
    optimizer.step()
    after = {optimizer.param_names[each]: full_tensor_of(each).detach().clone() for each in optimizer.parameters}
    outputs = done["outputs"]
    first = None if outputs is None else outputs["last_hidden_state" if "last_hidden_state" in outputs else "logits"]
    return {"loss": done["loss"].detach(), "outputs": first, "grads": grads, "after": after}


def step_all(world: str) -> dict[str, dict[str, Any]]:
    size, schedule = WORLDS[world]
    with ParallelMesh(tp=size, pp=2):
        return {
            name: step(
                name,
                HybridParallelPlugin(size, 2, precision="fp32", num_microbatches=2, parallel_output=False, **schedule),
            )
            for name in MODELS
        }


@cache
def ranks_of(world: str) -> list[dict[str, dict[str, Any]]]:
    return run_processes(step_all, 2 * WORLDS[world][0], world)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "world", ["pp2 x tp2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("pp2, interleaved", *SIMPLER))]
)
def test_equals_one_process(world: str, name: str) -> None:
    expected, ranks = step(name, None), [rank[name] for rank in ranks_of(world)]
    for kind in ("grads", "after"):
        found: dict[str, torch.Tensor] = {}
        for rank in ranks:
            for key, value in rank[kind].items():
                assert torch.equal(found.setdefault(key, value), value), f"{kind} of {key} differ between ranks"
        assert found.keys() == expected[kind].keys()
        for key, value in expected[kind].items():
            assert_equal(found[key], value, f"{kind} of {key}")
    seen = [rank["outputs"] for rank in ranks if rank["outputs"] is not None]
    assert len(seen) == WORLDS[world][0], "the ranks of the last stage have outputs"
    for outputs in seen:
        assert_equal(outputs, expected["outputs"], "outputs")
    for rank in ranks:
        assert_equal(rank["loss"], expected["loss"], "loss")


def test_lists_that_are_there_and_lists_that_have_to_be() -> None:
    stages = plan_of(model := build("T5EncoderModel")).stages
    assert stages is not None
    assert count_layers(model, stages) == NUM_LAYERS
    with pytest.raises(PlanError, match=r"'encoder\.block', which is missing in Embedding"):
        stages.lists_in(nn.Embedding(2, 2))
    with pytest.raises(PlanError, match="'shared', which is Embedding in T5EncoderModel"):
        Stages("encoder.block", (), previous=Stages("shared", (), may_be_missing=True)).lists_in(model)
