# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Plans that do not fit are errors, which name what does; what is left whole is said."""

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import colossal._src.shardformer.plans as tables
from colossal._src.shardformer.plans import hf_plan
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.errors import MeshError, PlanError
from colossal.shardformer import STYLES, ShardConfig, ShardFormer, plan_of
from colossal.tensor import ParallelPlan
from colossal.testing import fake_world, run_threads

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "vocab_size": 40}


def llama(**sizes: Any) -> nn.Module:
    options: dict[str, Any] = SIZES | {"num_attention_heads": 4} | sizes
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))


def divide(model: nn.Module, size: int, plan: ParallelPlan | None = None, **config: Any) -> nn.Module:
    with fake_world(size), ParallelMesh(tp=size) as mesh:
        return ShardFormer(ShardConfig(mesh, **config)).optimize(model, plan)[0]


class Block(nn.Module):
    """A model of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("path", sorted(Path(tables.__file__).parent.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_tables_are_short_and_name_styles_that_exist(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    module = importlib.import_module(f"colossal._src.shardformer.plans.{path.stem}")
    plans = [value for value in vars(module).values() if isinstance(value, ParallelPlan)]
    assert {style for plan in plans for style in [*plan.styles.values(), *plan.head_styles.values()]} <= set(STYLES)


def test_a_plan_of_ones_own() -> None:
    model = nn.ModuleDict({"a": Block(), "b": Block()}).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    expected = model["b"](model["a"](x))

    def program() -> torch.Tensor:
        with ParallelMesh(tp=3) as mesh:
            plan = ParallelPlan({"*.up": "colwise", "*.down": "rowwise"})
            own, shared = ShardFormer(ShardConfig(mesh)).optimize(copy.deepcopy(model), plan)
            assert shared == []
            assert isinstance(own, nn.ModuleDict)
            return own["b"](own["a"](x)).detach()

    for found in run_threads(program, 3):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)


def test_what_a_block_sends() -> None:
    """Two sums forward, over attention and the layers behind it, and two backward."""
    model = llama()

    def program() -> CommCounter:
        with ParallelMesh(tp=2) as mesh:
            own, _ = ShardFormer(ShardConfig(mesh)).optimize(copy.deepcopy(model))
            hidden = torch.randn(2, 5, 32, requires_grad=True)
            with CommCounter() as counter:
                own.get_submodule("model")(inputs_embeds=hidden).last_hidden_state.sum().backward()
            return counter

    counter = run_threads(program, 2)[0]
    activations = 4 * 2 * 5 * 32
    assert set(counter.calls) == {("all_reduce", "tp")}
    assert counter.bytes["all_reduce", "tp"] == counter.calls["all_reduce", "tp"] * activations
    assert counter.calls["all_reduce", "tp"] == 2 + 2


@pytest.mark.parametrize(
    ("sizes", "size", "found"),
    [
        ({"num_attention_heads": 6, "hidden_size": 48}, 4, r"num_key_value_heads=6 for tp=4.*1, 2, 3, 6\."),
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96}, 6, r"=4 for tp=6.*1, 2, 4, 12\."),
    ],
)
def test_heads_that_do_not_divide(sizes: dict[str, int], size: int, found: str) -> None:
    with pytest.raises(PlanError, match=found):
        divide(llama(**sizes), size)


def test_rows_that_match_nothing() -> None:
    with pytest.raises(PlanError, match=r"no module of Block for 'middle'.*up, down"):
        divide(Block(), 2, ParallelPlan({"middle": "colwise"}))
    assert divide(Block(), 2, ParallelPlan({"?middle": "colwise", "up": "colwise", "down": "rowwise"}))


def test_styles_that_there_are_not() -> None:
    with pytest.raises(PlanError, match=r"one of colwise, .*Found 'columnwise' for up\. Did you mean 'colwise'\?"):
        divide(Block(), 2, ParallelPlan({"up": "columnwise", "down": "rowwise"}))
    for style, module in (("colwise", nn.Embedding(8, 4)), ("vocab", nn.Linear(8, 4))):
        with pytest.raises(PlanError, match=f"sharded by vocab or .*Found '{style}' for 0, a {type(module).__name__}"):
            divide(nn.Sequential(module), 2, ParallelPlan({"0": style}))


def test_numbers_that_do_not_divide() -> None:
    with pytest.raises(PlanError, match=r"tp=2\. Found width=None in up"):
        divide(Block(), 2, ParallelPlan({"up": "colwise"}, divide_by_tp=("up.width",)))
    with pytest.raises(PlanError, match=r"tp=4\. Found out_features=10 in up"):
        divide(Block(), 4, ParallelPlan({"down": "rowwise"}, divide_by_tp=("up.out_features",)))


def test_layers_with_a_computation_of_their_own() -> None:
    gemma = transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES, num_attention_heads=4, head_dim=8))
    with pytest.raises(PlanError, match="embed_tokens, a GemmaTextScaledWordEmbedding"):
        divide(gemma, 2, ParallelPlan({"embed_tokens": "vocab"}))


def test_weights_that_something_else_makes_or_uses() -> None:
    for wrap in (torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.weight_norm):
        with pytest.raises(PlanError, match="the weight of 0 is computed, as by weight_norm"):
            divide(nn.Sequential(wrap(nn.Linear(4, 4))), 2, ParallelPlan({"0": "colwise"}))
    with pytest.raises(
        PlanError, match=r"weight of 0\.out_proj is used by torch\.nn\.MultiheadAttention, which does not"
    ):
        divide(nn.Sequential(nn.MultiheadAttention(4, 2)), 2, ParallelPlan({"0.out_proj": "rowwise"}))


def test_ties_that_are_divided_in_two_ways() -> None:
    with pytest.raises(PlanError, match=r"lm_head\.weight, \(40, 32\) on this rank"):
        divide(llama(tie_word_embeddings=True), 2, ParallelPlan({"embed_tokens": "vocab"}))


def test_families_without_a_table() -> None:
    with pytest.raises(PlanError, match="Block, which has none"):
        plan_of(Block())
    config = transformers.OlmoConfig(**SIZES)
    plan = hf_plan(config)
    assert plan is not None
    assert plan.styles["layers.*.self_attn.k_proj"] == "colwise_kv"
    config.base_model_tp_plan = {**(config.base_model_tp_plan or {}), "embed_tokens": "embedding_rowwise"}
    assert hf_plan(config) == plan
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "sideways"}
    with pytest.raises(PlanError, match="'sideways' for"):
        hf_plan(config)


def test_a_falcon_with_one_key_and_an_odd_number_of_heads_keeps_its_attention_whole() -> None:
    sizes: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    sizes["hidden_size"] = 142
    config = transformers.FalconConfig(**sizes, num_attention_heads=71, multi_query=True)
    falcon = divide(transformers.FalconModel(config), 2)
    assert falcon.get_parameter("h.0.self_attention.query_key_value.weight").shape == (142 + 2 * 2, 142)
    assert falcon.get_parameter("h.0.mlp.dense_h_to_4h.weight").shape == (2 * 142, 142)


def test_a_grid_is_refused() -> None:
    with fake_world(4), ParallelMesh(tp=4, tp_mode="2d") as mesh, pytest.raises(MeshError, match="arranged as 2d"):
        ShardFormer(ShardConfig(mesh)).optimize(llama())


@pytest.mark.parametrize("config", [{"enable_tensor_parallelism": False}, {}])
def test_a_model_that_nothing_divides_stays_as_it_is(config: dict[str, bool]) -> None:
    model = llama()
    before = dict(model.named_modules())
    assert divide(model, 2 if config else 1, **config) is model
    assert dict(model.named_modules()) == before


def test_large_layers_that_stay_whole_are_named(logged: Callable[[], list[str]]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(1024, 1024))
    divide(model, 2, ParallelPlan({"0": "colwise"}))
    assert "Sequential: tp=2 shards 1 layers; large layers that stay replicated: 1 (1024 x 1024)" in "\n".join(logged())


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


OF_BLOCKS = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def test_numbers_of_heads_that_a_plan_leaves_are_named(logged: Callable[[], list[str]]) -> None:
    """A view by the full number of heads splits the features of a shard in other places, without an error."""
    warnings: list[bool] = []
    for numbers in (("blocks.*.n_head",), ()):
        model = Blocks(Block(), Block())
        for block in model.blocks:
            block.n_head, block.head_dim = 2, 4
        divide(model, 2, ParallelPlan(OF_BLOCKS, divide_by_tp=numbers))
        warnings.append("that tp=2 shards: blocks.0.n_head, blocks.1.n_head. Where" in "\n".join(logged()))
    assert warnings == [False, True]


def test_numbers_in_layers_of_another_stage_are_left_out() -> None:
    model = Blocks(Block(), nn.Identity())  # one as it stands for a layer of another stage, without attributes
    model.blocks[0].n_head = 4
    divide(model, 2, ParallelPlan(OF_BLOCKS, divide_by_tp=("blocks.*.n_head",)).for_stage())
    assert model.blocks[0].n_head == 2
