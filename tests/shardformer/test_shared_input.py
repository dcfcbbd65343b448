"""Layers that get the same input send its gradient once, and remember nothing for longer than they run."""

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from equality import assert_within_rounding
from float64 import KeepFloat64
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.tensor import ParallelPlan, relayout
from colossal.testing import fake_world, run_threads

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "dropout_rate": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA | {"num_hidden_layers": 2, "vocab_size": 40}),
    "t5": ("T5ForConditionalGeneration", T5 | {"vocab_size": 40, "decoder_start_token_id": 0}),
}


class Cross(nn.Module):
    """Two siblings that get what the caller passes; the first of them may be computed again."""

    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if self.checkpoints is None:
            q = self.q(x)
        else:
            q: Any = checkpoint(self.q, x, use_reentrant=self.checkpoints)
        return self.out(torch.tanh(q * self.k(other)))


def divide(model: nn.Module, mesh: ParallelMesh) -> Any:
    plan = ParallelPlan({"q": "colwise", "k": "colwise", "out": "rowwise"}) if isinstance(model, Cross) else None
    return ShardFormer(ShardConfig(mesh)).optimize(copy.deepcopy(model), plan)[0]


def train(model: Any) -> None:
    ids = torch.arange(24).reshape(2, 12) % 37
    model(input_ids=ids, labels=ids).loss.backward()


def whole_grad(model: nn.Module, name: str, mesh: ParallelMesh) -> torch.Tensor | None:
    path, _, last = name.rpartition(".")
    layout, grad = getattr(model.get_submodule(path), "layouts", {}).get(last), model.get_parameter(name).grad
    return grad if layout is None or grad is None else relayout(grad, layout, replace(layout, dims=()), mesh)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing(name: str, is_reentrant: bool) -> None:
    kind, sizes = MODELS[name]
    class_of: Any = getattr(transformers, kind)
    model = class_of(class_of.config_class(**sizes)).double()
    alone, exact = copy.deepcopy(model), copy.deepcopy(model)
    train(alone)
    with KeepFloat64():  # norms round to float32 otherwise, also where layers run forward again
        train(exact)

    def program() -> dict[str, torch.Tensor | None]:
        with ParallelMesh(tp=2) as mesh:
            own = divide(model, mesh)
            own.activation_checkpointing_enable({"use_reentrant": is_reentrant})
            train(own)
            return {key: whole_grad(own, key, mesh) for key, _ in own.named_parameters()}

    for found in run_threads(program, 2):
        for (key, parameter), other in zip(alone.named_parameters(), exact.parameters(), strict=True):
            value = found[key]
            assert value is not None
            assert parameter.grad is not None
            assert other.grad is not None
            assert_within_rounding(value, parameter.grad, other.grad, torch.float32, key)


@pytest.mark.parametrize("checkpoints", [None, False, True])
@pytest.mark.parametrize(("is_same", "num_sums"), [(True, 1), (False, 2)])
def test_the_identity_of_the_input_decides(checkpoints: bool | None, is_same: bool, num_sums: int) -> None:
    model = Cross(checkpoints).double()
    x = torch.randn(3, 6, dtype=torch.float64)

    def step(own: nn.Module) -> list[torch.Tensor | None]:
        first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
        own(first, first if is_same else second).sum().backward()
        return [first.grad, second.grad]

    def program() -> tuple[list[torch.Tensor | None], int]:
        with ParallelMesh(tp=2) as mesh, CommCounter() as counter:
            grads = step(divide(model, mesh))
            return grads, counter.calls["all_reduce", "tp"]

    expected = step(copy.deepcopy(model))
    for found, calls in run_threads(program, 2):
        torch.testing.assert_close(found, expected)
        if checkpoints is None:
            assert calls == 1 + num_sums, "the output of the last layer, and the gradients of the inputs"


def test_second_derivatives() -> None:
    model = Cross().double()
    x = torch.randn(3, 6, dtype=torch.float64)

    def penalty(own: nn.Module) -> torch.Tensor:
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(own(given, given).square().sum(), given, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), given)[0]

    def program() -> torch.Tensor:
        with ParallelMesh(tp=2) as mesh:
            return penalty(divide(model, mesh))

    expected = penalty(copy.deepcopy(model))
    for found in run_threads(program, 2):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("features", [6, 5])
def test_nothing_is_kept_also_behind_an_error(features: int) -> None:
    with fake_world(2), ParallelMesh(tp=2) as mesh:
        own = divide(Cross(), mesh)
        x = torch.randn(3, 6)
        alive = weakref.ref(x)
        if features == 6:
            own(x, x)
        else:
            with pytest.raises(Exception, match="features"):
                own(x, torch.randn(3, features))
        del x
        gc.collect()
        assert alive() is None
        layers = own.q, own.k
        y = torch.randn(3, 6, requires_grad=True)
        assert len({layer(y).grad_fn.next_functions[1][0] for layer in layers}) == 2, "used alone, each has its own"


def test_a_copy_of_a_divided_model_shares_nothing_with_it() -> None:
    with fake_world(2), ParallelMesh(tp=2) as mesh:
        own = divide(Cross(), mesh)
        other = copy.deepcopy(own)
    assert other.q.product.input_transform is other.k.product.input_transform
    assert other.q.product.input_transform is not own.q.product.input_transform
    (hook,) = other._forward_hooks.values()
    assert hook.__self__ is other.q.product.input_transform
