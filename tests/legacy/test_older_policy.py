"""A user's policy for the older ShardFormer shards a model as the plan that it is read into, equal to one process."""

import copy
import importlib
from typing import Any, cast

import pytest
import torch
from torch import distributed as dist
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, PlanError
from colossal.legacy.shardformer import read_policy
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import assert_close, fake_world, run_threads

layer: Any = importlib.import_module("colossal.shardformer.layer")
base_policy: Any = importlib.import_module("colossal.shardformer.policies.base_policy")
Description, Replacement = base_policy.ModulePolicyDescription, base_policy.SubModuleReplacementDescription


class BertPolicy(base_policy.Policy):
    def config_sanity_check(self) -> None:
        assert self.model.config.num_attention_heads % self.shard_config.tensor_parallel_size == 0

    def preprocess(self) -> Any:
        return self.model

    def postprocess(self) -> Any:
        """The documented base class asks for one."""
        return self.model

    def module_policy(self) -> Any:
        config = self.model.config
        attention = Description(
            attribute_replacement={
                "attention.self.all_head_size": config.hidden_size // 2,
                "attention.self.num_attention_heads": config.num_attention_heads // 2,
            },
            sub_module_replacement=[
                *(Replacement(f"attention.self.{name}", layer.Linear1D_Col) for name in ("query", "key", "value")),
                Replacement("attention.output.dense", layer.Linear1D_Row, kwargs={"fp8_communication": False}),
                Replacement("crossattention.self.query", layer.Linear1D_Col, ignore_if_not_exist=True),
                Replacement("intermediate.dense", layer.Linear1D_Col),
                Replacement("output.dense", layer.Linear1D_Row),
            ],
        )
        policy = {"BertLayer": attention}
        embedding = Replacement("word_embeddings", layer.VocabParallelEmbedding1D)
        return self.append_or_create_submodule_replacement(embedding, policy, "BertEmbeddings")


class GPT2Policy(base_policy.Policy):
    def module_policy(self) -> Any:
        blocks = Description(
            attribute_replacement={"attn.split_size": 8, "attn.num_heads": 2},
            sub_module_replacement=[
                Replacement("attn.c_attn", layer.GPT2FusedLinearConv1D_Col, {"n_fused": 3}),
                Replacement("attn.c_proj", layer.GPT2FusedLinearConv1D_Row),
                Replacement("mlp.c_fc", layer.GPT2FusedLinearConv1D_Col, {"split_sizes": [64]}),
                Replacement("mlp.c_proj", layer.GPT2FusedLinearConv1D_Row),
            ],
        )
        embedding = Description(sub_module_replacement=[Replacement("wte", layer.VocabParallelEmbedding1D)])
        head = Description(sub_module_replacement=[Replacement("lm_head", layer.VocabParallelLMHead1D)])
        return {"GPT2Block": blocks, "GPT2Model": embedding, GPT2LMHeadModel: head}


def bert() -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    rates: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**sizes, **rates, vocab_size=32, max_position_embeddings=16))


def gpt2() -> nn.Module:
    rates: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=32, n_positions=16, **rates))


TOKENS = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
CASES: dict[str, Any] = {
    "bert": (bert, BertPolicy, torch.arange(4) % 2),
    "gpt2": (gpt2, GPT2Policy, TOKENS),
}


def train(model: Any, labels: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
    """The losses of three steps, and the gradient of a norm in the first."""
    optimizer, losses, norm = torch.optim.SGD(model.parameters(), lr=0.1), [], None
    for _ in range(3):
        loss = model(input_ids=TOKENS, labels=labels).loss
        loss.backward()
        losses.append(loss.detach())
        if norm is None:
            norm = next(each for name, each in model.named_parameters() if "norm" in name.lower() or "ln_" in name).grad
            norm = norm.clone()
        optimizer.step()
        optimizer.zero_grad()
    return losses, norm


def check(case: str, expected: Any, original: nn.Module) -> None:
    _, policy, labels = CASES[case]
    mesh = ParallelMesh(tp=2)
    model = copy.deepcopy(original)
    plan = read_policy(policy(), model, mesh)
    sharded: Any
    sharded, _ = ShardFormer(ShardConfig(mesh)).optimize(model, plan)
    if case == "bert":
        assert sharded.bert.encoder.layer[0].attention.self.query.weight.shape == (8, 16)
        assert sharded.bert.embeddings.word_embeddings.weight.shape == (16, 16)
    else:
        assert sharded.transformer.h[0].attn.c_attn.weight.shape == (16, 24)
        assert sharded.lm_head.weight is sharded.transformer.wte.weight
    losses, norm = train(sharded, labels)
    for found, one in zip(losses, expected[0], strict=True):
        assert_close(found, one, "loss", rtol=1e-4)
    assert_close(norm, expected[1], "gradient of a norm", rtol=1e-3, atol=1e-5)


def check_passed_directly(expected: Any, original: nn.Module) -> None:
    model: Any = copy.deepcopy(original)
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", custom_policy=BertPolicy())
    boosted, *_ = Booster(plugin=plugin).boost(model)
    former = ShardFormer(ShardConfig(plugin.mesh))
    for sharded in (boosted, former.optimize(copy.deepcopy(original), BertPolicy())[0]):
        found = train(sharded, CASES["bert"][2])
        for loss, one in zip(found[0], expected[0], strict=True):
            assert_close(loss, one, "loss", rtol=1e-4)
    with pytest.raises(ConfigError, match="policy is a ParallelPlan, .* or a function"):
        former.optimize(copy.deepcopy(original), cast("Any", BertPolicy))  # the class, not a policy


def test_a_policy_is_passed_as_the_documentation_passes_it() -> None:
    original = bert()
    run_threads(check_passed_directly, 2, train(copy.deepcopy(original), CASES["bert"][2]), original)


@pytest.mark.parametrize("case", CASES)
def test_a_policy_of_ones_own_equals_one_process(case) -> None:
    build, _, labels = CASES[case]
    original = build()
    expected = train(copy.deepcopy(original), labels)
    run_threads(check, 2, case, expected, original)


def read(description: Any, key: Any = nn.Sequential) -> Any:
    class Own(base_policy.Policy):
        def module_policy(self) -> Any:
            return {key: description}

    model: Any = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 6))
    model.width = 7
    with fake_world(2):
        return read_policy(Own(), model, ParallelMesh(tp=2))


def test_options_of_layers() -> None:
    rows = [
        Replacement("0", layer.Linear1D_Col, {"gather_output": True}),
        Replacement("2", layer.Linear1D_Row, {"parallel_input": False}),
    ]
    assert read(Description(sub_module_replacement=rows)).styles == {
        "0": "colwise_gather_output",
        "2": "rowwise_split_input",
    }
    rows = [Replacement("2", layer.Linear1D_Col, {"split_sizes": [2, 2, 2]})]
    assert read(Description(sub_module_replacement=rows)).styles == {"2": "packed_colwise(3)"}
    assert read(Description(attribute_replacement={"width": 7})).divide_by_tp == ()


REFUSED = {
    "method_replacement for Sequential": Description(method_replacement={"forward": print}),
    "param_replacement for Sequential": Description(param_replacement=[print]),
    "Sequential.* by 3": Description(attribute_replacement={"width": 3}),
    "Found no 5": Description(sub_module_replacement=[Replacement("5", layer.Linear1D_Col)]),
    "Found ReLU": Description(sub_module_replacement=[Replacement("1", nn.ReLU)]),
    "seq_parallel_mode": Description(
        sub_module_replacement=[Replacement("0", layer.Linear1D_Col, {"seq_parallel_mode": "ring"})]
    ),
    "split_sizes": Description(sub_module_replacement=[Replacement("2", layer.Linear1D_Col, {"split_sizes": [1, 5]})]),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_no_plan_expresses_is_refused(text) -> None:
    with pytest.raises(PlanError, match=text.replace("Sequential.* by 3", "width=7 by 3")):
        read(REFUSED[text])


def test_classes_that_the_model_does_not_have_and_other_work_are_refused() -> None:
    with pytest.raises(PlanError, match="none of the class BertLayer"):
        read(Description(attribute_replacement={"a": 1}), "BertLayer")

    class After(BertPolicy):
        def postprocess(self) -> Any:
            self.model.tie_weights()
            return self.model

    with fake_world(2), pytest.raises(PlanError, match="or a postprocess that does more .* in After"):
        read_policy(After(), bert(), ParallelMesh(tp=2))


def test_get_autopolicy_finds_the_plan_of_a_family() -> None:
    find = importlib.import_module("colossal.shardformer.policies.auto_policy").get_autopolicy
    assert find(gpt2()).styles["h.*.attn.c_attn"] == "packed_colwise(3)"
    with pytest.raises(PlanError, match="which has none"):
        find(nn.Linear(2, 2))


LOGITS = torch.randn(6, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.tensor([0, 9, 4, -100, 5, 3])


def check_loss(mode: str) -> None:
    mesh = ParallelMesh(tp=2)
    with mesh:
        own = LOGITS.chunk(2, 1)[mesh.rank("tp")].clone().requires_grad_()
        loss = layer.cross_entropy_1d(own, LABELS, process_group=mesh.group("tp"), vocab_size=10, mode=mode)
        loss.backward()
        full = LOGITS.clone().requires_grad_()
        expected = nn.functional.cross_entropy(full, LABELS, reduction=mode)
        expected.backward()
        assert_close(loss.detach(), expected.detach(), "loss", rtol=1e-6)
        assert own.grad is not None and full.grad is not None  # noqa: PT018
        assert_close(own.grad, full.grad.chunk(2, 1)[mesh.rank("tp")], "gradient", rtol=1e-6)
        own.grad, full.grad = None, None
        found = layer.dist_log_prob_1d(own, LABELS, process_group=mesh.group("tp"))
        found.square().sum().backward()
        each = -nn.functional.cross_entropy(full, LABELS, reduction="none").unsqueeze(-1)
        each.square().sum().backward()
        assert_close(found.detach(), each.detach(), "log-probabilities", rtol=1e-6)
        assert own.grad is not None and full.grad is not None  # noqa: PT018
        assert_close(own.grad, full.grad.chunk(2, 1)[mesh.rank("tp")], "gradient", rtol=1e-6)
        half = layer.cross_entropy_1d(own, LABELS, dtype=torch.bfloat16)
        assert half.detach() != layer.cross_entropy_1d(own, LABELS).detach()
        alone = layer.cross_entropy_1d(full, LABELS, process_group=mesh.group("dp"), mode=mode)
        assert_close(alone.detach(), expected.detach(), "all classes on a rank", rtol=1e-6)
        with pytest.raises(ConfigError, match="'mean' or 'sum'"):
            layer.cross_entropy_1d(own, LABELS, mode="none")


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_cross_entropy_1d_equals_one_process(mode) -> None:
    run_threads(check_loss, 2, mode)


def test_classes_are_sharded_over_all_ranks_without_a_mesh() -> None:
    def program() -> torch.Tensor:
        own = LOGITS.chunk(2, 1)[dist.get_rank()]
        return layer.dist_log_prob_1d(own, LABELS).squeeze(-1)

    expected = -nn.functional.cross_entropy(LOGITS, LABELS, reduction="none")
    for found in run_threads(program, 2):
        assert_close(found, expected, "log-probabilities", rtol=1e-6)
