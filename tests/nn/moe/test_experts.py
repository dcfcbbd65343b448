# pyright: reportUnknownMemberType=false
"""Experts by themselves: stacked weights equal modules, grouped products equal loops, and all have gradients."""

from typing import Any

import pytest
import torch
from equality import assert_equal
from torch import nn
from torch.nn import functional

from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import PlanError
from colossal.nn.moe import (
    Capacity,
    FeedForwardExperts,
    MixtureOfExperts,
    Router,
    RouterLosses,
    StackedExperts,
    update_expert_biases,
)
from colossal.testing import run_processes

WIDTH, NUM_EXPERTS = 8, 4
KINDS: dict[str, dict[str, Any]] = {
    "gated": {},
    "biases": {"bias": True, "gated": False, "activation": functional.gelu},
    "rows that are not aligned": {"inner": 5},
}


def build(dtype: torch.dtype = torch.float64, inner: int = 16, **options: Any) -> FeedForwardExperts:
    experts = FeedForwardExperts(NUM_EXPERTS, WIDTH, inner, **options).to(dtype)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 4)
    return experts


def routing_of(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of which none goes to the last expert."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randn(number, WIDTH, generator=draw, dtype=torch.float64)
    chosen = torch.rand(number, NUM_EXPERTS - 1, generator=draw).argsort(1)[:, :2]
    return tokens, chosen, torch.rand(number, 2, generator=draw, dtype=torch.float64)


def loop(
    experts: FeedForwardExperts, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Each token by itself."""
    named = dict(experts.named_parameters())
    up, down = named.get("gate_up_proj", named.get("up_proj")), named["down_proj"]
    assert up is not None
    results: list[Any] = []
    for token, of_token, weighted in zip(tokens, chosen.tolist(), weights, strict=True):
        total: Any = 0
        for expert, weight in zip(of_token, weighted, strict=True):
            inner = up[expert] @ token
            if "up_proj_bias" in named:
                inner = inner + named["up_proj_bias"][expert]
            if experts.gated:
                gate, inner = inner.chunk(2)
                inner = experts.activation(gate) * inner
            else:
                inner = experts.activation(inner)
            output = down[expert] @ inner
            if "down_proj_bias" in named:
                output = output + named["down_proj_bias"][expert]
            total = total + weight * output
        results.append(total)
    return torch.stack(results)


def run(experts: Any, compute: Any, routing: Any) -> dict[str, torch.Tensor]:
    tokens, chosen, weights = (each.clone() for each in routing)
    dtype = next(experts.parameters()).dtype
    tokens, weights = tokens.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
    experts.zero_grad()
    result = compute(tokens, chosen, weights)
    result.square().sum().backward()
    leaves = {"tokens": tokens, "weights": weights, **dict(experts.named_parameters())}
    return {"result": result.detach()} | {name: each.grad for name, each in leaves.items() if each.grad is not None}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_feed_forward_experts(options: dict[str, Any]) -> None:
    routing, exact = routing_of(40), build(**options)
    expected = run(exact, lambda *args: loop(exact, *args), routing)
    found = run(exact, exact, routing)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_equal(found[name], value, name)
    assert not found["down_proj"][-1].any()
    single = build(torch.float32, **options)
    for name, value in run(single, single, routing).items():  # by grouped products, where rows are aligned
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_tokens_give_gradients_of_zeros(dtype: torch.dtype) -> None:
    of_modules = StackedExperts(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS)).to(dtype)
    for experts in (build(dtype, bias=True), of_modules):
        found = run(experts, experts, routing_of(0))
        assert len(found) == 3 + len([*experts.parameters()])
        assert not any(each.any() for each in found.values())


class Odd(nn.Module):
    """An expert of parts, one of which depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Dropout(0.5))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.last = nn.Linear(3, WIDTH, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(rows)) * self.scale


def test_stacked_modules() -> None:
    modules = [Odd().double().eval() for _ in range(NUM_EXPERTS)]
    experts = StackedExperts(modules).eval()
    assert {*dict(experts.named_parameters())} == {"layers_0_weight", "layers_0_bias", "scale", "last_weight"}
    tokens, chosen, weights = routing_of(20)
    expected = torch.zeros_like(tokens)
    for at in range(20):
        for place in range(2):
            expected[at] += weights[at, place] * modules[int(chosen[at, place])](tokens[at : at + 1])[0].detach()
    assert_equal(experts(tokens, chosen, weights).detach(), expected, "result")
    assert not torch.equal(experts.train()(tokens, chosen, weights), expected)


@pytest.mark.parametrize(
    "modules",
    [
        [],
        [nn.Linear(2, 2), nn.Linear(2, 3)],
        [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)],
        [nn.BatchNorm1d(2), nn.BatchNorm1d(2)],
    ],
)
def test_modules_that_differ_are_refused(modules: list[nn.Module]) -> None:
    with pytest.raises(PlanError, match=f"Found {len(modules)} modules"):
        StackedExperts(modules)


def test_autocast() -> None:
    layer = MixtureOfExperts(Router(WIDTH, NUM_EXPERTS, 2), build(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        output, routing = layer(torch.randn(10, WIDTH))
    assert output.dtype == torch.bfloat16
    assert routing.weights.dtype == torch.float32


# ------------------------------------------------------------------------------------------ the layer


def test_dropped_choices_add_nothing() -> None:
    tokens = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    router = Router(WIDTH, NUM_EXPERTS, 2, capacity=Capacity(train=0.5, minimum=2)).double()
    layer = MixtureOfExperts(router, build(), nn.Linear(WIDTH, WIDTH).double())
    output, routing = layer(tokens)
    assert int(routing.num_dropped) >= 8
    flat = tokens.flatten(0, 1)
    expected = loop(build(), flat, routing.chosen, routing.weights) + layer.get_submodule("shared")(flat)
    assert_equal(output.detach().flatten(0, 1), expected.detach(), "output")
    router.capacity = Capacity(train=None)
    again, other = layer(tokens, replay=routing.record)
    assert torch.equal(again, output)
    assert torch.equal(other.record, routing.record)


def replay_on_ranks(capacity: Capacity | None) -> Any:
    with ParallelMesh(ep=2) as mesh:
        torch.manual_seed(0)
        router = Router(32, 8, 2, scores="sigmoid", renormalize=True, capacity=capacity)
        layer = MixtureOfExperts(router, FeedForwardExperts(8, width=32, inner=64))
        torch.manual_seed(mesh.rank("ep"))
        tokens = torch.randn(261, 32)
        output, routing = layer(tokens)
        return torch.equal(layer(tokens, replay=routing.record)[0], output), int(routing.num_dropped)


@pytest.mark.parametrize("capacity", [None, Capacity(train=1.0)], ids=["all", "dropped"])
def test_a_replay_equals_bit_by_bit_over_ranks(capacity: Capacity | None) -> None:
    for is_equal, num_dropped in run_processes(replay_on_ranks, 2, capacity):
        assert is_equal
        assert (num_dropped > 0) == (capacity is not None)


def draw_on_ranks() -> Any:
    with ParallelMesh(tp=2, ep=2):
        torch.manual_seed(1)
        experts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(NUM_EXPERTS)]
        layer = MixtureOfExperts(Router(WIDTH, NUM_EXPERTS, 1), experts)
        output, _ = layer(torch.randn(7, WIDTH))
        return output.detach(), torch.rand(5)


def test_ranks_of_tp_draw_alike_after_dropout_in_experts() -> None:
    (first, drawn), (second, other) = run_processes(draw_on_ranks, 2)
    assert torch.equal(first, second)
    assert torch.equal(drawn, other)


# ------------------------------------------------------------------------------------------ files


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        router = Router(WIDTH, NUM_EXPERTS, 2, bias_rate=0.01, losses=RouterLosses(aux_weight=0.1, aux_over="global"))
        experts = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS)]
        self.moe = MixtureOfExperts(router, experts)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output, routing = self.moe(tokens)
        return output.square().mean() + routing.loss


def train_and_save(folder: Any) -> None:
    with ParallelMesh(dp=2, ep=2) as mesh:
        booster, model = Booster(device="cpu", plugin=TorchDDPPlugin()), Net(0)
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        booster.backward(model(torch.randn(9 - mesh.rank("dp"), WIDTH)), optimizer)
        optimizer.step()
        update_expert_biases(model)
        booster.save_model(model, str(folder / "model.safetensors"))
        booster.save_optimizer(optimizer, str(folder / "optimizer"))


def load_and_save(folder: Any, name: str, ep: int) -> None:
    with ParallelMesh(ep=ep):
        booster, model = Booster(device="cpu", plugin=TorchDDPPlugin()), Net(1)
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        booster.load_model(model, str(folder / "model.safetensors"))
        booster.load_optimizer(optimizer, str(folder / "optimizer"))
        booster.save_model(model, str(folder / name))


def test_files_fit_any_number_of_ranks(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    run_processes(train_and_save, 2, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["moe.experts.weight"].shape == (NUM_EXPERTS, WIDTH, WIDTH)
    assert saved["moe.router.bias_steps"].any()
    Net(1).load_state_dict(saved)
    for ep in (1, 4):
        name = f"{ep}.safetensors"
        run_processes(load_and_save, ep, tmp_path, name, ep)
        again = load_file(tmp_path / name)
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[key], value) for key, value in saved.items())
