"""Sequences that cannot be shared are errors that say what can."""

from typing import Any

import pytest
import torch
import transformers
from families import PAIRED, VOCAB, build, inputs_of

from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.errors import ConfigError, PlanError, ShapeError, UnsupportedError
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.tensor import ParallelPlan
from colossal.testing import WorldError, fake_world, run_threads

Axes = dict[str, Any]


def share(name: str, axes: Axes, mode: Any, attention: str = "sdpa", inner: int | None = None) -> Any:
    config = ShardConfig(
        ParallelMesh(**axes),
        enable_sequence_parallelism=True,
        sequence_parallelism_mode=mode,
        inner_ring_size=inner,
    )
    return ShardFormer(config).optimize(build(name, attention))[0]


CASES: dict[str, tuple[type[Exception], str, tuple[Any, ...]]] = {
    "no-such-mode": (ConfigError, "Found 'rings'", ("llama", {"sp": 2}, "rings")),
    "ranks-on-sp": (ConfigError, "sequences are sharded over the tp axis", ("llama", {"sp": 2}, "split_gather")),
    "ranks-on-tp": (ConfigError, "sequences are sharded over the sp axis", ("llama", {"tp": 2}, "ring_attn")),
    "both-axes": (ConfigError, "sharded over the tp axis only", ("llama", {"sp": 2, "tp": 2}, "ring")),
    "inner-ring": (ConfigError, "Only ring_attn has", ("llama", {"sp": 2}, "all_to_all", "sdpa", 2)),
    "heads": (PlanError, "num_attention_heads=4, of which tp=2", ("llama", {"sp": 4, "tp": 2}, "all_to_all")),
    "own-attention": (PlanError, "computes it by itself", ("bloom", {"sp": 2}, "all_to_all")),
    "two-lists": (PlanError, "which has 2, such as those of an encoder", ("t5", {"tp": 2}, "split_gather")),
    "odd-heads": (PlanError, "attention stays replicated", ("falcon-odd-heads", {"tp": 2}, "split_gather")),
    "flex": (UnsupportedError, "'flex_attention'", ("llama", {"sp": 2}, "ring_attn", "flex_attention")),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_shared_is_an_error(case) -> None:
    kind, text, (name, axes, *rest) = CASES[case]
    with fake_world(8), pytest.raises(kind, match=text):
        share(name, axes, *rest)


@pytest.mark.parametrize(("axes", "mode"), [({"sp": 8}, "ring_attn"), ({"tp": 8}, "split_gather")])
def test_lengths_that_do_not_divide_are_errors_that_say_which_do(axes, mode) -> None:
    with fake_world(8):
        model = share("gpt2" if mode == "ring_attn" else "bloom", axes if mode == "ring_attn" else {"tp": 4}, mode)
        inputs = {key: value[:, :10] for key, value in inputs_of("gpt2").items()}
        with pytest.raises(ShapeError, match="such as 16" if mode == "ring_attn" else "such as 12"):
            model(**inputs)


@pytest.mark.parametrize(("axes", "mode"), [({"sp": 2}, "all_to_all"), ({"tp": 2}, "ring")])
def test_images_cannot_be_padded(axes, mode) -> None:
    with fake_world(2):
        model = share("vit", axes, mode)
        with pytest.raises(UnsupportedError, match="Found images of 17 tokens.*tp_size or pp_size without"):
            model(**inputs_of("vit"))


HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
OTHERWISE: dict[str, tuple[str, dict[str, Any], Axes, str, str]] = {
    "linear-attention": ("MiniMax", HYBRID, {"sp": 2}, "all_to_all", "with linear_attention, which would"),
    "linear-attention-over-tp": ("MiniMax", HYBRID, {"tp": 2}, "split_gather", "with linear_attention, which would"),
    "convolution": ("Qwen3Next", HYBRID, {"tp": 2}, "split_gather", "linear_attention, Conv1d, which would combine"),
    "dynamic-mask": ("Doge", {}, {"sp": 2}, "all_to_all", "DogeAttention chooses keys before it, by its dt_proj"),
    "dynamic-mask-in-a-ring": ("Doge", {}, {"sp": 2}, "ring_attn", "In the mode 'ring_attn' .*by its dt_proj, of the"),
    "scale-by-position": ("Ministral3", {}, {"sp": 2}, "ring_attn", "llama_4_scaling_beta says. Use the mode 'split"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_layers_that_combine_tokens_otherwise_than_by_attention_are_refused(case) -> None:
    name, sizes, axes, mode, text = OTHERWISE[case]
    model = small(name, **sizes)
    with fake_world(2), pytest.raises(PlanError, match=text):
        ShardFormer(sharing_of(axes, mode)).optimize(model)


@pytest.mark.parametrize(("axes", "mode"), [({"sp": 2}, "all_to_all"), ({"tp": 2}, "split_gather")])
def test_layers_that_take_something_else_for_each_token_are_refused(axes, mode) -> None:
    with fake_world(2):
        model, _ = ShardFormer(sharing_of(axes, mode)).optimize(small("Gemma4Text", hidden_size_per_layer_input=16))
        with pytest.raises(UnsupportedError, match=r"Gemma4TextDecoderLayer, that takes another tensor of \(2, 12, 16"):
            model(**inputs_of("llama"))


def small(name: str, **sizes: Any) -> Any:
    experts = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    kind: Any = getattr(transformers, f"{name}Config")
    given = PAIRED | {"head_dim": 16, "vocab_size_per_layer_input": VOCAB} | experts | sizes
    return transformers.AutoModelForCausalLM.from_config(
        kind(**{key: given[key] for key in given if key in dir(kind())})
    )


def sharing_of(axes: Axes, mode: Any) -> ShardConfig:
    mesh = ParallelMesh(**axes)
    return ShardConfig(mesh, enable_sequence_parallelism=True, sequence_parallelism_mode=mode)


def test_dropout_in_a_ring_is_refused() -> None:
    def program() -> None:
        model = share("gpt2", {"sp": 2}, "ring_attn")
        for block in model.transformer.h:
            block.attn.attn_dropout.p = 0.1
        model.train()(**inputs_of("gpt2"))

    with pytest.raises(WorldError, match="Found an attention layer with dropout"):
        run_threads(program, 2)


def test_a_plan_without_attention_is_refused() -> None:
    plan = ParallelPlan({}, stages=None)
    config = ShardConfig(enable_sequence_parallelism=True)
    with fake_world(2), ParallelMesh(tp=2), pytest.raises(PlanError, match="no stages"):
        ShardFormer(config).optimize(torch.nn.Linear(2, 2), plan)


def test_sharing_is_asked_for() -> None:
    with fake_world(2), pytest.raises(ConfigError, match="enable_sequence_parallelism=True"):
        ShardFormer(ShardConfig(ParallelMesh(sp=2))).optimize(build("llama"))
    with pytest.raises(ConfigError, match="enable_sequence_parallelism=True"):
        HybridParallelPlugin(tp_size=1, pp_size=1, sp_size=2)
    with pytest.raises(ConfigError, match="sp_size=0"):
        HybridParallelPlugin(tp_size=1, pp_size=1, sp_size=0)


def test_the_mode_follows_from_the_axes() -> None:
    with fake_world(4):
        axes: dict[str, Any]
        for axes, mode in (({"sp": 2}, "all_to_all"), ({"tp": 2}, "split_gather")):
            sharing = ShardConfig(enable_sequence_parallelism=True).sequence_parallel_config(ParallelMesh(**axes))
            assert sharing is not None
            assert sharing.mode == mode
        assert ShardConfig(enable_sequence_parallelism=True).sequence_parallel_config(ParallelMesh()) is None


def test_split_gather_sends_as_much_as_tensor_parallelism_alone() -> None:
    """Behind the layers tokens are put together once more, and in front their gradients are."""

    def count(shares: bool) -> dict[tuple[Any, Any], int]:
        config = ShardConfig(ParallelMesh(tp=2), enable_sequence_parallelism=shares)
        model = ShardFormer(config).optimize(build("llama"))[0]
        with CommCounter() as counter:
            model(**inputs_of("llama")).loss.backward()
        return dict(counter.bytes)

    hidden = 2 * 12 * 64 * 8
    for alone, shared in zip(run_threads(count, 2, False), run_threads(count, 2, True), strict=True):
        layers = alone["all_reduce", "tp"] - shared["all_reduce", "tp"]
        moved = shared["all_gather", "tp"] + shared["reduce_scatter", "tp"]
        assert moved == layers + hidden  # half a hidden state before the layers, half behind them


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_another_attention_function_set_afterwards_is_refused(mode) -> None:
    """It would see the tokens of this rank only, without an error where no mask is passed."""
    with fake_world(2):
        model = share("llama", {"sp": 2}, mode)
        model.set_attn_implementation("sdpa")
        with pytest.raises(UnsupportedError, match=r"attn_implementation='sdpa', set afterwards.*Set it before boost"):
            model(**inputs_of("llama"))


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_another_model_of_the_same_configuration_is_refused(mode) -> None:
    """Its attention would exchange tokens with other ranks."""
    with fake_world(2):
        teacher: Any = build("llama")
        student: Any = type(teacher)(teacher.config)
        config = ShardConfig(ParallelMesh(sp=2), enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
        ShardFormer(config).optimize(student)
        with pytest.raises(UnsupportedError, match=r"another model, a LlamaAttention.*Build one of them of copy"):
            teacher(**inputs_of("llama"))
