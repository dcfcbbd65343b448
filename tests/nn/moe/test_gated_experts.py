# pyright: reportArgumentType=false
"""Gated experts in one operation equal the same in several, in values, gradients and theirs, and keep less for them."""

from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from colossal._src.nn.moe import gated_experts
from colossal._src.nn.moe.gated_experts import gated_feed_forward, gated_sums

EXPERTS, WIDTH, INSIDE = 4, 6, 5
NAMES = ("tokens", "weights", "gate_up", "down")


def draw(dtype: torch.dtype = torch.float64, num_tokens: int = 7) -> list[torch.Tensor]:
    """Tokens, weights of two experts for each, and the weights of experts."""
    generator = torch.Generator().manual_seed(0)
    shapes = (num_tokens, WIDTH), (num_tokens, 2), (EXPERTS, 2 * INSIDE, WIDTH), (EXPERTS, WIDTH, INSIDE)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def chosen_by(num_tokens: int) -> torch.Tensor:
    """Two different experts for each token, but never the third one."""
    scores = torch.rand(num_tokens, EXPERTS, generator=torch.Generator().manual_seed(1))
    scores[:, 2] = -1
    return scores.topk(2).indices


def by_tokens(tokens: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The definition, token by token."""
    rows: list[torch.Tensor] = []
    for x, own, experts in zip(tokens, weights, chosen_by(len(tokens)), strict=True):
        opened = [(gate_up[expert] @ x).chunk(2) for expert in experts]
        results = [
            down[expert] @ (gate.sigmoid() * gate * up) for expert, (gate, up) in zip(experts, opened, strict=True)
        ]
        rows.append(sum(weight * result for weight, result in zip(own, results, strict=True)))
    return torch.stack(rows)


def sums(tokens: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return gated_sums(tokens, chosen_by(len(tokens)), weights, gate_up, down)


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize(
    ("dtype", "of_weights", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-13),
        (torch.float32, torch.float32, 1e-5),
        (torch.float32, torch.float64, 1e-5),
        (torch.bfloat16, torch.float32, 3e-2),
        (torch.bfloat16, torch.bfloat16, 3e-2),
    ],
)
def test_equals_the_definition(dtype, of_weights, tolerance, has_kernel, monkeypatch) -> None:
    if not has_kernel:
        monkeypatch.setattr(gated_experts, "has_gate_kernel", lambda _: False)
    given = draw(dtype)
    given[1] = given[1].detach().to(of_weights).requires_grad_()
    found = sums(*given)
    assert found.dtype == dtype
    found.square().sum().backward()
    exact = [each.detach().double().requires_grad_() for each in given]
    expected = by_tokens(*exact)
    expected.square().sum().backward()
    pairs = [(found, expected), *((one.grad, other.grad) for one, other in zip(given, exact, strict=True))]
    for name, (one, other) in zip(("result", *NAMES), pairs, strict=True):
        assert one is not None
        assert other is not None
        apart = (one.double() - other).abs().max() / other.abs().max()
        assert apart.item() <= tolerance, name


@pytest.mark.parametrize("frozen", range(4))
def test_what_is_frozen_gets_no_gradient_and_the_others_the_same(frozen: int) -> None:
    all_grads = torch.autograd.grad(sums(*(given := draw())).square().sum(), given)
    given[frozen].requires_grad_(False)
    rest = [each for each in given if each.requires_grad]
    found = iter(torch.autograd.grad(sums(*given).square().sum(), rest))
    for name, each, expected in zip(NAMES, given, all_grads, strict=True):
        assert not each.requires_grad or torch.equal(next(found), expected), name


def test_another_pass_through_the_same_graph_has_the_same_gradients() -> None:
    given = draw()
    loss = sums(*given).square().sum()
    first = torch.autograd.grad(loss, given, retain_graph=True)
    second = torch.autograd.grad(loss, given)
    assert all(map(torch.equal, first, second))


def nested(*given: torch.Tensor) -> torch.Tensor:
    return checkpoint(sums, *given, use_reentrant=False)


def under_hooks(*given: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        return sums(*given)


@pytest.mark.parametrize(
    "run",
    [
        partial(checkpoint, sums, use_reentrant=False),
        partial(checkpoint, sums, use_reentrant=True),
        partial(checkpoint, nested, use_reentrant=False),
        partial(checkpoint, nested, use_reentrant=True),
        under_hooks,
        partial(checkpoint, under_hooks, use_reentrant=False),
    ],
)
def test_recomputed_and_offloaded_activations_give_the_gradients_of_plain_operations(run: Any) -> None:
    given = draw()
    expected = torch.autograd.grad(by_tokens(*given).square().sum(), given)
    loss = run(*given).square().sum()
    for retain_graph in (True, True, False):  # the last pass may write over what it reads
        for each in given:
            each.grad = None
        loss.backward(retain_graph=retain_graph)
        for name, each, other in zip(NAMES, given, expected, strict=True):
            torch.testing.assert_close(each.grad, other, rtol=1e-13, atol=1e-13, msg=name)


def test_hooks_may_keep_what_is_saved_and_give_it_to_another_pass() -> None:
    """As those that look at activations, or save equal ones once."""
    given, kept = draw(), list[torch.Tensor]()
    expected = torch.autograd.grad(by_tokens(*given).square().sum(), given)

    def keep(tensor: torch.Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    with saved_tensors_hooks(keep, kept.__getitem__):
        loss = sums(*given).square().sum()
    values = [each.clone() for each in kept]
    calls = count()
    with saved_tensors_hooks(lambda _: next(calls), kept.__getitem__):
        again = sums(*given).square().sum()
    assert next(calls) == len(kept)
    for each in (loss, again):
        found = torch.autograd.grad(each, given)
        assert all(map(torch.equal, kept, values))
        for name, one, other in zip(NAMES, found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13, msg=name)


def test_the_gradient_of_results_is_left_as_it_is() -> None:
    """Rows that are sorted already are those of the program."""
    rows, _, gate_up, down = draw()
    found = gated_feed_forward(rows, gate_up, down, torch.tensor([2, 2, 5, 7]))
    grad = torch.randn(found.shape, dtype=found.dtype)
    before = rows.detach().clone(), grad.clone()
    found.backward(grad)
    assert torch.equal(rows.detach(), before[0])
    assert torch.equal(grad, before[1])


@pytest.mark.parametrize("projects", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_twice_differentiable(projects: bool) -> None:
    """By products with random vectors, or by each number of each gradient."""
    given = draw(num_tokens=3)
    assert torch.autograd.gradcheck(sums, given, fast_mode=projects)
    assert torch.autograd.gradgradcheck(sums, given, fast_mode=projects)
    rows, _, *weights = given
    ends = torch.tensor([1, 1, 3, 3])

    def of_rows(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return gated_feed_forward(rows, gate_up, down, ends)

    assert torch.autograd.gradcheck(of_rows, (rows, *weights), fast_mode=projects)
    assert torch.autograd.gradgradcheck(of_rows, (rows, *weights), fast_mode=projects)


def test_gradients_to_be_differentiated_again_are_those_of_one_pass_if_a_router_sees_the_tokens() -> None:
    tokens, _, gate_up, down = draw()
    router = torch.randn(WIDTH, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def gradients_of(run: Any) -> list[torch.Tensor]:
        loss = run(tokens, (tokens @ router).softmax(1), gate_up, down).square().sum()
        first = torch.autograd.grad(loss, (tokens, gate_up), create_graph=True)
        penalty = torch.stack([each.square().sum() for each in first]).sum()
        return [*first, *torch.autograd.grad(penalty, (tokens, gate_up, down))]

    for one, other in zip(gradients_of(sums), gradients_of(by_tokens), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_no_tokens_are_computed_and_every_weight_has_a_gradient() -> None:
    given = draw(num_tokens=0)
    found = sums(*given)
    assert found.shape == (0, WIDTH)
    found.sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in given)


def test_autocast_computes_in_its_dtype() -> None:
    given = draw(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = sums(*given)
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    assert {each.grad.dtype for each in given if each.grad is not None} == {torch.float32}


def test_only_what_the_first_product_makes_is_kept() -> None:
    """Beside what the program has anyway: tokens and the weights of experts."""
    given, kept = draw(), dict[int, Any]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        sums(*given)
    own = {each.data_ptr() for each in given}
    rows = [each.shape for address, each in kept.items() if address not in own and each.dtype == torch.float64]
    assert rows == [(14, 2 * INSIDE)]
