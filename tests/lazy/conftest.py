"""What is built lazily is what is built at once, bit for bit."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from colossal.lazy import LazyInitContext, LazyTensor, lazy_tensors, materialize


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def _assert_same_tensor(name: str, eager: torch.Tensor, lazy: torch.Tensor) -> None:
    assert not isinstance(lazy, LazyTensor), name
    for what in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(eager, what) == getattr(lazy, what), (name, what)
    assert eager.stride() == lazy.stride(), name
    assert torch.equal(_bits(eager), _bits(lazy)), name


def _built_twice(build: Callable[[], Any], seed: int = 5) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    eager = build()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with LazyInitContext():
        lazy = build()
    assert torch.equal(state, torch.get_rng_state()), "the generator must be where eager construction leaves it"
    return eager, lazy


@pytest.fixture
def same_tensors() -> Callable[..., None]:
    """Build tensors at once and lazily, and compare them; the lazy ones get their values in another order."""

    def check(build: Callable[[], Any]) -> None:
        eager, lazy = (tree_leaves(each) for each in _built_twice(build))
        assert len(eager) == len(lazy)
        state = torch.get_rng_state()
        order = list(range(len(eager)))
        random.Random(len(eager)).shuffle(order)  # noqa: S311
        for place in order:
            values = lazy[place].values() if isinstance(lazy[place], LazyTensor) else lazy[place]
            if isinstance(values, torch.Tensor):
                _assert_same_tensor(f"result {place}", eager[place].detach(), values.detach())
            else:
                assert values == eager[place]
        assert torch.equal(state, torch.get_rng_state())

    return check


@pytest.fixture
def same_modules() -> Callable[..., tuple[nn.Module, nn.Module]]:
    """Build a module at once and lazily, and compare all that is in it."""

    def check(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
        eager, lazy = _built_twice(build)
        held = list({id(each): each for each in lazy_tensors(lazy)}.values())
        random.Random(len(held)).shuffle(held)  # noqa: S311
        for each in held[::2]:
            each.values()
        assert materialize(lazy) is lazy
        assert not list(lazy_tensors(lazy))
        named = [
            (f"{kind} {name}", tensor, other)
            for kind in ("named_parameters", "named_buffers")
            for (name, tensor), (same, other) in zip(
                getattr(eager, kind)(remove_duplicate=False), getattr(lazy, kind)(remove_duplicate=False), strict=True
            )
            if name == same or pytest.fail(f"{name} is called {same}")
        ]
        for name, tensor, other in named:
            _assert_same_tensor(name, tensor, other)
            assert type(tensor) is type(other), name
            assert vars(tensor).keys() == vars(other).keys(), name
        ties = [[a is b for _, a, _ in named for _, b, _ in named], [a is b for *_, a in named for *_, b in named]]
        assert ties[0] == ties[1]
        assert list(eager.state_dict()) == list(lazy.state_dict())
        non_persistent = [[sorted(each._non_persistent_buffers_set) for each in m.modules()] for m in (eager, lazy)]
        assert non_persistent[0] == non_persistent[1]
        return eager, lazy

    return check
