"""The context itself."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from colossal.errors import UnsupportedError
from colossal.lazy import LazyInitContext, LazyTensor, lazy_tensors


class Stubborn(nn.Module):
    """Goes on without the result of an operation that can not be written down, as torch's parametrizations do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        with suppress(NotImplementedError):
            self.weight.data.resize_(3, 3)


def test_a_refusal_that_somebody_swallows_is_raised_at_the_end() -> None:
    with pytest.raises(UnsupportedError, match=r"resize_.default while Stubborn was built"), LazyInitContext():
        Stubborn()


def test_another_error_inside_comes_through() -> None:
    with pytest.raises(ZeroDivisionError), LazyInitContext():
        nn.Linear(2, Stubborn().weight.numel() // 0)


def test_one_context_may_be_open_twice() -> None:
    context = LazyInitContext()
    with context:
        with context:
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    after = nn.Linear(2, 2)
    assert len(list(lazy_tensors(inner))) == len(list(lazy_tensors(outer))) == 2
    assert not list(lazy_tensors(after))


def test_a_lazy_module_may_go_to_the_meta_device() -> None:
    with LazyInitContext():
        layer = nn.Linear(2, 2)
    moved = layer.weight.to("meta")
    assert moved.is_meta
    assert not isinstance(moved, LazyTensor)


def test_another_class_of_tensors_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Leave it out"):
        LazyInitContext(torch.Tensor)  # type: ignore[arg-type]
