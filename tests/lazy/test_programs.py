"""Random programs over three tensors and their views."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

WINDOWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tensor: tensor,
    lambda tensor: tensor.t(),
    lambda tensor: tensor[1:3],
    lambda tensor: tensor[:, ::2],
    lambda tensor: tensor.chunk(2, dim=1)[1],
    lambda tensor: tensor.view(-1)[5:],
]
IN_PLACE: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda target, _: target.uniform_(),
    lambda target, _: target.normal_(),
    lambda target, _: target.zero_(),
    lambda target, _: target.mul_(0.5),
    lambda target, _: target.bernoulli_(0.5),
    lambda target, source: target.copy_(source.sum()),
    lambda target, source: target.add_(source.mean()),
    lambda target, source: target.view_as(target).sub_(source.max()),
    lambda target, source: torch._foreach_add_([target, source.clone()], 1),
    lambda target, source: target.fill_(source.flatten()[0].item()),
]
NEW: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda first, _: first.clone(),
    lambda first, second: first * second,
    lambda first, _: torch.rand_like(first),
    lambda first, second: second.t().contiguous() - first,
    lambda first, _: torch.dropout(first, 0.5, train=True),
    lambda first, _: first,
]
PLACE = st.integers(0, 2)
STEP = st.one_of(
    st.tuples(
        st.just("in place"), PLACE, PLACE, st.sampled_from(IN_PLACE), st.sampled_from(WINDOWS), st.sampled_from(WINDOWS)
    ),
    st.tuples(st.just("new"), PLACE, PLACE, PLACE, st.sampled_from(NEW)),
)


def run(steps: list[Any]) -> list[torch.Tensor]:
    tensors = [torch.randn(4, 4), torch.zeros(4, 4), torch.arange(16.0).view(4, 4)]
    seen = []
    for kind, *rest in steps:
        if kind == "new":
            result, first, second, make = rest
            tensors[result] = make(tensors[first], tensors[second])
        else:
            target, source, change, window, other = rest
            change(window(tensors[target]), other(tensors[source]))
        seen.append(tensors[0].sum())
    return [*tensors, *seen]


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps=st.lists(STEP, min_size=1, max_size=12))
def test_a_random_program_gives_what_it_gives_at_once(same_tensors: Callable[..., None], steps: list[Any]) -> None:
    same_tensors(lambda: run(steps))
