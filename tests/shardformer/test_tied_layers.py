# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Layers that share parameters with other layers: gradients are those of one process."""

from typing import Any

import pytest
import torch
from divided import assert_trained, whole_grads
from families import build, inputs_of, results_of
from torch import nn

from colossal.cluster import ParallelMesh
from colossal.errors import PlanError
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import fake_world, run_processes

TIES = {
    "norms": ("qwen3", "input_layernorm.weight"),
    "norms of heads": ("qwen3", "self_attn.q_norm.weight"),
    "norms of one layer": ("qwen3", "post_attention_layernorm.weight"),
    "projections": ("qwen3", "mlp.down_proj.weight"),
    "routers": ("mixtral", "mlp.gate.weight"),
}
MODES: dict[str, dict[str, Any]] = {
    mode: {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode} for mode in ("split_gather", "ring")
} | {"tp": {}}


def tied(name: str) -> nn.Module:
    family, path = TIES[name]
    model: Any = build(family)
    first, second = model.model.layers
    source = first.get_parameter("input_layernorm.weight" if name == "norms of one layer" else path)
    for layer in (first, second):
        module, _, last = path.rpartition(".")
        setattr(layer.get_submodule(module), last, source)
    return model


def train() -> dict[tuple[str, str], Any]:
    found = {}
    for mode, options in MODES.items():
        for name in TIES:
            with ParallelMesh(tp=2) as mesh:
                model, _ = ShardFormer(ShardConfig(mesh, **options)).optimize(tied(name))
                loss, _ = results_of(model, inputs_of("llama"))
                loss.backward()
                found[mode, name] = loss.detach(), whole_grads(model, mesh)
    return found


def test_tied_parameters_equal_one_process() -> None:
    """Gradients that are summed up over ranks are so once, not for each layer."""
    ranks = run_processes(train, 2)
    for mode, name in ranks[0]:
        assert_trained([rank[mode, name] for rank in ranks], tied(name), f"{mode}, {name}")


def tie_the_last_norm(model: Any) -> None:
    model.model.norm.weight = model.model.layers[1].input_layernorm.weight


def repeat_a_layer(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


@pytest.mark.parametrize(
    ("tie", "axes", "mode", "found"),
    [
        (tie_the_last_norm, {"tp": 2}, "ring", r"norm\.weight, which gets all tokens, is the input_layernorm\.weight"),
        (repeat_a_layer, {"tp": 2}, "split_gather", "some are one and the same module"),
        (repeat_a_layer, {"sp": 2}, "all_to_all", "some are one and the same module"),
    ],
)
def test_what_has_all_tokens_in_one_place_and_some_in_another_is_refused(tie, axes, mode, found) -> None:
    model = build("llama")
    tie(model)
    with fake_world(2):
        config = ShardConfig(ParallelMesh(**axes), enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
        with pytest.raises(PlanError, match=found):
            ShardFormer(config).optimize(model)


def test_attention_that_two_layers_share_gets_all_tokens_once() -> None:
    model: Any = build("llama")
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    with fake_world(2), torch.no_grad():
        config = ShardConfig(ParallelMesh(tp=2), enable_sequence_parallelism=True)
        sharded: Any = ShardFormer(config).optimize(model)[0]
        assert sharded(**inputs_of("llama")).logits.shape[1] == inputs_of("llama")["input_ids"].shape[1]
