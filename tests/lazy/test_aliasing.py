# pyright: reportArgumentType=false, reportCallIssue=false
"""Views, copies and versions: what an operation saw then is what it sees when it runs later."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from colossal.errors import UnsupportedError
from colossal.lazy import LazyInitContext, LazyTensor, lazy_tensors, materialize


def views() -> list[torch.Tensor]:
    base = torch.zeros(4, 6)
    base[1:3, ::2] = 1
    base.t()[2].add_(torch.arange(4.0))
    left, right = base.chunk(2, dim=1)
    right.copy_(left * 2)
    flat = base.view(-1)
    flat[3:5].uniform_()
    return [base, left, right, flat, base.diagonal(), base.unfold(0, 2, 1)]


def versions() -> list[torch.Tensor]:
    tensor = torch.zeros(3)
    before = tensor.clone()
    tensor.add_(1)
    between = tensor * 2
    tensor.copy_(torch.arange(3.0))
    again = tensor + between
    tensor.zero_()
    return [before, between, again, tensor]


def ping_pong() -> list[torch.Tensor]:
    first, second = torch.ones(2), torch.ones(2)
    for _ in range(40):
        first.add_(second)
        second.mul_(0.5).add_(first)
    return [first, second]


def long_chain() -> list[torch.Tensor]:
    tensor = torch.ones(2)
    for _ in range(1500):
        tensor = tensor * 0.999
    return [tensor]


def several_results() -> list[Any]:
    matrix = torch.randn(5, 3)
    lists = [torch.ones(2), torch.arange(3.0)]
    torch._foreach_add_(lists, 1)
    torch._foreach_mul_(lists, [each.clone() for each in lists])
    return [
        *torch.linalg.qr(matrix),
        torch.linalg.svd(matrix).S,
        *torch.geqrf(matrix),  # torch can not tell its shapes
        *matrix.split([2, 3]),
        *matrix.unbind(1),
        *torch.sort(matrix, dim=0),
        *torch.var_mean(matrix),
        *lists,
        *torch._foreach_neg(lists),
        torch.linalg.slogdet(matrix[:3]),
    ]


def python_values() -> list[Any]:
    rates = [each.item() for each in torch.linspace(0, 0.1, 4)]
    tensor = torch.full((2,), rates[2])
    if tensor.sum() > 0:
        tensor += 1
    drawn = float(torch.randn(()))
    array = (tensor * 3).numpy()
    found = tensor.nonzero()
    tensor[tensor > 0.5] = 7
    return [tensor, rates, drawn, torch.from_numpy(np.array(array)), tensor.tolist(), found, bool(tensor.any())]


def data() -> list[torch.Tensor]:
    weight = nn.Parameter(torch.randn(4, 5))
    weight.data.copy_(torch.arange(20.0).view(4, 5))
    weight.data[1] = 9
    other = nn.Parameter(torch.randn(3))
    other.data = torch.arange(3.0) * 2
    with torch.no_grad():
        weight += 1
        weight.set_(weight * 2)
    return [weight, other]


def foreign() -> list[torch.Tensor]:
    values = torch.tensor([1.0, 2.0, 3.0])
    table = torch.empty(2, 3)
    table[0] = values
    table[1] = torch.from_numpy(np.arange(3.0))
    other = torch.tensor([1.0, 2.0, 3.0])
    other.copy_(torch.ones(3) * 4)  # what has values gets them at once
    return [table, values, other, torch.cat([other, table[0]]), torch.stack([torch.tensor(2.0), table.sum()])]


def complexes() -> list[torch.Tensor]:
    turned = torch.polar(torch.ones(3), torch.arange(3.0))
    return [turned.conj() * 2, torch.view_as_real(turned), turned.real, turned.imag.clone()]


def other_shapes_in_place() -> list[torch.Tensor]:
    matrix = torch.arange(6.0).view(2, 3)
    alias = matrix.view(-1)
    matrix.t_()
    matrix[2].mul_(5)
    column = torch.rand(20).unsqueeze_(1)
    column.normal_()
    return [matrix, alias, column, column.transpose_(0, 1), torch.ones(1, 2, 1).squeeze_(), matrix.sum(0)]


def results_given() -> list[torch.Tensor]:
    result = torch.empty(3)
    return [torch.add(torch.ones(3), 2, out=result), result, torch.arange(3, out=torch.empty(3))]


PROGRAMS = {
    each.__name__: each
    for each in (
        views,
        versions,
        ping_pong,
        long_chain,
        several_results,
        python_values,
        data,
        foreign,
        complexes,
        other_shapes_in_place,
        results_given,
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_what_it_gives_at_once(name: str, same_tensors: Callable[..., None]) -> None:
    same_tensors(PROGRAMS[name])


def test_tensors_that_are_no_parameters(same_modules: Callable[..., Any]) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.arange(3.0)
            self.several = [torch.ones(2), {"inner": torch.zeros(2)}]
            self.weight = nn.Parameter(self.plain[1:])
            self.weight.tag = "kept"  # type: ignore[attr-defined]

    _, lazy = same_modules(Holder)
    assert lazy.plain.tolist() == [0, 1, 2]
    assert lazy.several[1]["inner"].tolist() == [0, 0]
    with torch.no_grad():
        lazy.weight.fill_(5)
    assert lazy.plain.tolist() == [0, 5, 5], "a view stays a view"


def test_what_is_materialized_may_change_before_its_copies_are() -> None:
    with LazyInitContext():
        model = nn.Linear(3, 20)
        average = copy.deepcopy(model)
        doubled = model.weight.detach() * 2
    expected = model.weight.values().clone()
    materialize(model)
    model.weight.data.fill_(7)
    assert torch.equal(doubled.values(), expected * 2)
    assert torch.equal(materialize(average).weight, expected)
    assert torch.equal(model.weight, torch.full((20, 3), 7.0))


def test_a_copy_outside_of_the_context() -> None:
    with LazyInitContext():
        model = nn.Linear(3, 20)
    other = materialize(copy.deepcopy(model))
    assert isinstance(model.weight, LazyTensor)
    assert torch.equal(other.weight, materialize(model).weight)
    assert other.weight is not model.weight
    assert other.weight.data_ptr() != model.weight.data_ptr()


@pytest.mark.parametrize("change", ["in place", "behind the back of torch"])
def test_what_an_operation_saw_must_not_change(change: str) -> None:
    array = np.zeros(3)
    values = torch.from_numpy(array)
    with LazyInitContext():
        made = torch.ones(3) * values
    if change == "in place":
        values.add_(1)
    else:
        array += 1
    with pytest.raises(UnsupportedError, match=r"shape \(3,\) that was written to after aten.mul"):
        made.values()


def test_a_buffer_that_is_filled_again_and_again_is_refused() -> None:
    array = np.zeros(2, dtype=np.float32)
    with LazyInitContext():
        table = torch.empty(3, 2)
        for row in range(3):
            array[:] = row
            table[row] = torch.from_numpy(array)
    with pytest.raises(UnsupportedError, match="write to a copy"):
        table.values()


def test_a_failure_leaves_values_as_they_were() -> None:
    late = torch.ones(2)
    with LazyInitContext():
        made = torch.ones(2)
        made.add_(1)
        first = made.values().clone()
        made.mul_(3)
        made.mul_(late)
    late.zero_()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="aten.mul_"):
            made.values()
    late.fill_(1)
    assert torch.equal(made.values(), first * 3)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another size, asked for": (lambda: torch.ones(2).resize_(3), "changes the shape"),
    "another size in place": (lambda: torch.add(torch.ones(2), 1, out=torch.empty(0)), "another size"),
    "values and none together": (
        lambda: torch._foreach_add_([torch.tensor([1.0]), torch.ones(1)], 1),
        "has to be known now",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_operation_and_the_module(name: str) -> None:
    action, reason = REFUSED[name]

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            action()

    with pytest.raises(UnsupportedError, match=f"Found aten.* while Odd was built: .*{reason}"), LazyInitContext():
        Odd()


def test_a_model_without_values_says_what_to_do() -> None:
    with LazyInitContext():
        model = nn.Linear(2, 3)
    with pytest.raises(UnsupportedError, match="Booster.boost, or to LazyInitContext.materialize"):
        model(torch.ones(1, 2))
    assert materialize(model)(torch.ones(1, 2)).shape == (1, 3)


def test_nested_contexts() -> None:
    torch.manual_seed(4)
    expected = [torch.randn(20), torch.randn(5), torch.rand(3), torch.randn(30, 2).t()]
    state = torch.get_rng_state()
    torch.manual_seed(4)
    with LazyInitContext():
        first = torch.randn(20)
        with LazyInitContext():
            inner = [torch.randn(5), torch.rand(3)]
            total = first.sum().item()
        last = torch.randn(30, 2).t()
    assert torch.equal(state, torch.get_rng_state())
    assert total == expected[0].sum().item()
    made = [first, *inner, last]
    assert all(isinstance(each, LazyTensor) for each in made)
    assert all(torch.equal(each.values(), other) for each, other in zip(made, expected, strict=True))


def test_an_error_inside_leaves_torch_as_it_was() -> None:
    with pytest.raises(KeyError), LazyInitContext(default_device="meta"):
        raise KeyError
    assert type(torch.ones(1)) is torch.Tensor
    assert torch.ones(1).device.type == "cpu"


def test_a_default_device_is_not_where_draws_are_skipped() -> None:
    torch.manual_seed(2)
    expected = torch.empty(20).uniform_()
    torch.manual_seed(2)
    with LazyInitContext(default_device="meta"):
        drawn = torch.empty(20, device="cpu").uniform_()
        assert torch.ones(1).device.type == "meta"
    assert torch.equal(drawn.values(), expected)


def test_what_concerns_no_tensor_runs_at_once() -> None:
    with LazyInitContext(), torch.profiler.record_function("building"):
        made = torch.ones(2)
    assert made.values().tolist() == [1, 1]


def test_an_optimizer_keeps_its_parameters() -> None:
    results = []
    for lazily in (False, True):
        torch.manual_seed(1)
        if lazily:
            with LazyInitContext():
                model = nn.Linear(3, 20)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            materialize(model)
        else:
            model = nn.Linear(3, 20)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        results.append(model.weight.detach().clone())
        assert optimizer.param_groups[0]["params"][0] is model.weight
    assert torch.equal(*results)


def test_one_tensor_after_the_other() -> None:
    with LazyInitContext():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    materialize(model[1])
    assert list(lazy_tensors(model)) == [model[0].weight, model[0].bias] or len(list(lazy_tensors(model))) == 2
    assert not isinstance(model[1].weight, LazyTensor)
    materialize(model)
    assert not list(lazy_tensors(model))
