# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Plans that configurations of transformers have, of experts above all, against one process."""

import copy
from typing import Any

import pytest
import torch
import transformers
from divided import assert_trained, whole_grads
from families import PAIRED, inputs_of, results_of
from torch import nn

from colossal.cluster import ParallelMesh
from colossal.errors import PlanError
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.tensor import ParallelPlan
from colossal.testing import fake_world, run_processes

WIDTHS: dict[str, Any] = PAIRED | {"head_dim": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # all tokens go through shared experts, whose rows end as those of parameters of the others do
    "shared experts": (
        "Glm4Moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "transposed weights": ("AriaText", {"moe_num_experts": 4, "intermediate_size": 32}),
    "no experts": ("Gemma4Text", {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 131}),
}


def build(name: str) -> nn.Module:
    kind, sizes = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**WIDTHS | sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    model.set_experts_implementation("eager")
    return model


def train() -> dict[str, Any]:
    found = {}
    for name in CONFIGS:
        with ParallelMesh(tp=2) as mesh:
            model, _ = ShardFormer(ShardConfig(mesh)).optimize(build(name))
            loss, _ = results_of(model, inputs_of("llama"))
            loss.backward()
            found[name] = loss.detach(), whole_grads(model, mesh)
    return found


def test_equal_to_one_process() -> None:
    ranks = run_processes(train, 2)
    for name in CONFIGS:
        assert_trained([rank[name] for rank in ranks], build(name), name)


class Experts(nn.Module):
    """As those of transformers say how they store their weights."""

    def __init__(self, names: tuple[str, ...] = ("gate_up_proj", "down_proj"), **options: bool) -> None:
        super().__init__()
        self.num_experts = 4
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(4, 8, 8)))
        vars(self).update(options)


@pytest.mark.parametrize(
    ("experts", "found"),
    [
        (Experts(has_bias=True), "has_bias=True"),
        (Experts(is_concatenated=False), "is_concatenated=False"),
        (Experts(has_post_expert_norm=True), "has_post_expert_norm=True"),
        (Experts(("up_proj", "down_proj"), has_gate=False), "has_gate=False, gate_up_proj, up_proj"),
        (Experts(("gate_up_proj", "down_proj", "scale")), "scale"),
    ],
)
def test_experts_that_are_no_sum_over_features_are_refused(experts: nn.Module, found: str) -> None:
    """A bias would be added by each rank, and a norm taken of a part of the sum."""
    plan = ParallelPlan({"experts": "moe_tp_experts"})
    model = nn.ModuleDict({"experts": copy.deepcopy(experts)})
    with (
        fake_world(2),
        ParallelMesh(tp=2) as mesh,
        pytest.raises(PlanError, match=f"Found Experts, with {found} instead. Pass ep_size"),
    ):
        ShardFormer(ShardConfig(mesh)).optimize(model, plan)
