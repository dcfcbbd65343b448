# pyright: reportAttributeAccessIssue=false
"""Layers shared out to stages, batches divided, and gradients of weights that are made up for later."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from families import build, inputs_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from colossal._src.pipeline import Microbatching, Stage, merge_outputs, partition_by_counts, split_batch, stage_of_layer
from colossal._src.pipeline.microbatch import tensors_in
from colossal._src.pipeline.p2p import TensorMeta, decode_metas, encode_metas
from colossal.errors import ConfigError, PlanError, ShapeError
from colossal.pipeline import StagePlacement, WeightGrads, partition_balanced, partition_uniform
from colossal.shardformer import plan_of
from colossal.tensor import Stages


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Batch:
    x: torch.Tensor
    name: str


# ------------------------------------------------------------------------------------------ layers


@given(st.integers(1, 40), st.integers(1, 12))
def test_uniform_parts_differ_by_one_layer(num_layers, num_stages) -> None:
    if num_stages > num_layers:
        with pytest.raises(ConfigError, match=f"Use at most {num_layers} stages"):
            partition_uniform(num_layers, num_stages)
        return
    parts = partition_uniform(num_layers, num_stages)
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    assert {len(part) for part in parts} <= {num_layers // num_stages, num_layers // num_stages + 1}
    assert [stage_of_layer(parts, layer) for part in parts for layer in part] == [
        stage for stage, part in enumerate(parts) for _ in part
    ]


def test_layers_left_over_go_to_the_stages_in_the_middle() -> None:
    assert [[len(part) for part in partition_uniform(num_layers, 4)] for num_layers in range(8, 13)] == [
        [2, 2, 2, 2], [2, 2, 3, 2], [2, 3, 3, 2], [2, 3, 3, 3], [3, 3, 3, 3],
    ]  # fmt: skip


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_balanced_parts_are_as_light_as_any(weights, data) -> None:
    num_stages = data.draw(st.integers(1, len(weights)))
    parts = partition_balanced(weights, num_stages)
    assert [layer for part in parts for layer in part] == list(range(len(weights)))
    assert len(parts) == num_stages
    assert all(parts)

    def lightest(begin: int, left: int) -> int:
        if left == 1:
            return sum(weights[begin:])
        ends = range(begin + 1, len(weights) - left + 2)
        return min(max(sum(weights[begin:end]), lightest(end, left - 1)) for end in ends)

    assert max(sum(weights[layer] for layer in part) for part in parts) == lightest(0, num_stages)


def test_numbers_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"Found \[2, 0\] for 2 layers"):
        partition_by_counts([2, 0])
    with pytest.raises(ConfigError, match=r"Found \[2, 1\] for 4 layers"):
        partition_by_counts([2, 1], num_layers=4)
    with pytest.raises(ConfigError, match=r"Found -1\."):
        partition_balanced([1, -1], 2)


def test_stages_go_round_or_in_a_v() -> None:
    assert [StagePlacement(3, 2).rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [StagePlacement(3, 2, is_v=True).rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert StagePlacement(3, 2, is_v=True).stages_of(0) == (0, 5)


# ------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6),
        {"x": torch.arange(6), "scale": torch.tensor(2.0), "name": "a"},
        (torch.arange(6), [torch.ones(6, 2)]),
        Pair(torch.arange(6), torch.ones(6)),
        Batch(torch.arange(6), "a"),
        CausalLMOutput(loss=torch.tensor(1.0), logits=torch.ones(6, 2)),
    ],
)
def test_parts_are_built_as_the_batch_is(batch) -> None:
    parts = split_batch(batch, Microbatching(microbatch_size=2))
    assert len(parts) == 3
    assert all(type(part) is type(batch) for part in parts)
    again = merge_outputs(parts)
    assert type(again) is type(batch)
    for found, expected in zip(tensors_in(again), tensors_in(batch), strict=True):
        assert torch.equal(found, expected)


def test_batches_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="Found 5 samples and num_microbatches=2"):
        split_batch(torch.ones(5), Microbatching(2))
    with pytest.raises(ConfigError, match=r"Found \[3, 4\] in a tuple"):
        split_batch((torch.ones(3), torch.ones(4)), Microbatching(1))
    with pytest.raises(ConfigError, match="Found no tensor in a str"):
        split_batch("text", Microbatching(1))
    batch = {"labels": torch.ones(4), "num_items_in_batch": torch.tensor(4)}
    assert len(split_batch(batch, Microbatching(1))) == 1
    with pytest.raises(ConfigError, match=r"2 times too small. Leave it out, and weight the loss by booster\."):
        split_batch(batch, Microbatching(2))
    for wrong in ((None, None), (2, 2), (0, None)):
        with pytest.raises(ConfigError, match="num_microbatches says how many"):
            Microbatching(*wrong)


def test_a_header_says_what_comes() -> None:
    known = (TensorMeta((2, 3), torch.bfloat16, True), TensorMeta((), torch.int64, False))
    assert decode_metas(encode_metas(known)) == known
    with pytest.raises(ShapeError, match=r"Found torch\.complex64"):
        encode_metas([TensorMeta((1,), torch.complex64, False)])
    with pytest.raises(ShapeError, match="Found 20 tensors"):
        encode_metas([TensorMeta((1,), torch.float32, False)] * 20)


# ------------------------------------------------------------------------------------------ stages


def test_a_sequence_is_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(3, 4)
    expected, state = model(x), model.state_dict()
    first = Stage.of_sequential(nn.Sequential(*model), [range(2), range(2, 3)], 0)
    last = Stage.of_sequential(nn.Sequential(*model), [range(2), range(2, 3)], 1)
    assert torch.equal(last(first(None, (x, "target")), None), expected)
    assert {**first.module.state_dict(), **last.module.state_dict()}.keys() == state.keys()


def test_inputs_are_passed_as_the_model_takes_them() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return (x + y) * scale

    stage = Stage(Two(), 0, 1)
    x = torch.ones(2)
    assert torch.equal(stage(None, (x, x, "target")), 2 * x)
    assert torch.equal(stage(None, {"x": x, "y": x, "scale": 2.0, "target": x}), 4 * x)
    assert torch.equal(Stage(nn.ReLU(), 0, 1)(None, x), x)


def test_a_model_without_its_first_layer_elsewhere_is_found() -> None:
    model = build("gpt2")
    stages = plan_of(model).stages
    assert stages is not None
    stage = Stage.of_model(model, stages, [range(1), range(1, 2)], 0)
    model.transformer.h = model.transformer.h[:1]
    model.transformer.ln_f, model.lm_head = nn.Identity(), nn.Identity()
    with pytest.raises(PlanError, match="left out the first layer of the stage after stage 0"):
        stage(None, {"input_ids": inputs_of("gpt2")["input_ids"]})


def test_a_parameter_around_the_layers_is_found() -> None:
    model = nn.Module()
    model.inner, model.scale = nn.Module(), nn.Parameter(torch.ones(1))
    model.inner.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    with pytest.raises(PlanError, match="Found the parameter scale of Module"):
        Stage.of_model(model, Stages("inner.layers", pre_layers=()), [range(1), range(1, 2)], 0)


# ------------------------------------------------------------------------------------------ gradients of weights


@pytest.mark.parametrize("casts", [False, True])
def test_gradients_that_were_left_are_the_same(casts) -> None:
    x = torch.randn(2, 5, 4, requires_grad=True)
    layer, turned, bias = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
    leaves = (x, layer.weight, layer.bias, turned, bias)

    def compute() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            return torch.addmm(bias, layer(x).flatten(0, 1), turned).float().square().sum()

    compute().backward()
    expected = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    later, called = WeightGrads(), []
    layer.weight.register_post_accumulate_grad_hook(lambda _: called.append(1))
    with later.defer():
        loss = compute()
    loss.backward()
    assert (layer.weight.grad, turned.grad, called) == (None, None, [])
    later.accumulate()
    assert called == [1]
    later.accumulate()  # nothing is left
    assert called == [1]
    for leaf, grad in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        torch.testing.assert_close(leaf.grad, grad, rtol=2e-2 if casts else 1e-6, atol=2e-2 if casts else 1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_of_an_activation_checkpoint_are_left_alone(reentrant) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4), nn.Linear(4, 3)
    x, later = torch.randn(2, 3, requires_grad=True), WeightGrads()
    first(x).tanh().square().sum().backward()
    second(first(x).tanh()).sum().backward()
    expected = [gradient(first.weight), gradient(second.weight)]
    with later.defer():
        out = checkpoint(lambda y: first(y).tanh(), x, use_reentrant=reentrant)
        loss = out.square().sum() + second(out).sum()
    loss.backward()
    assert second.weight.grad is None  # it is outside of the checkpoint
    later.accumulate()
    torch.testing.assert_close([gradient(first.weight), gradient(second.weight)], expected)


def gradient(weight: torch.Tensor) -> torch.Tensor:
    """Take the gradient away."""
    grad, weight.grad = weight.grad, None
    assert grad is not None
    return grad


def test_layers_whose_input_needs_no_gradient_are_left_alone() -> None:
    layer, later = nn.Linear(2, 2), WeightGrads()
    with later.defer():
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None
