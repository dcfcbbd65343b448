"""Tensor-parallel layers made from modules that were built lazily."""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import colossal.nn as parallel
from colossal.cluster import ParallelMesh
from colossal.lazy import LazyInitContext, LazyTensor
from colossal.testing import run_threads

PAIRS = {
    "linear": (lambda: nn.Linear(8, 12), parallel.Linear),
    "no bias": (lambda: nn.Linear(8, 12, bias=False), parallel.Linear),
    "norm": (lambda: nn.LayerNorm(8), parallel.LayerNorm),
    "embedding": (lambda: nn.Embedding(16, 8), parallel.Embedding),
}
MESHES: dict[str, dict[str, Any]] = {"1d": {"tp": 2}, "2d": {"tp": 4, "tp_mode": "2d"}}


@pytest.fixture
def _hasty_threads() -> Iterator[None]:
    """Threads that give way to each other almost after each instruction."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_hasty_threads")
@pytest.mark.parametrize("mode", MESHES)
@pytest.mark.parametrize("kind", PAIRS)
def test_parts_are_those_of_a_module_with_values(kind: str, mode: str) -> None:
    make, layer = PAIRS[kind]
    torch.manual_seed(3)
    eager = make()
    torch.manual_seed(3)
    with LazyInitContext():
        lazy = make()

    def program() -> list[tuple[torch.Tensor, torch.Tensor]]:
        with ParallelMesh(**MESHES[mode]):
            found, expected = layer.from_native(lazy), layer.from_native(eager)
        assert found.layouts == expected.layouts
        return list(zip(found.parameters(), expected.parameters(), strict=True))

    for pairs in run_threads(program, MESHES[mode]["tp"]):
        assert pairs
        for own, other in pairs:
            assert type(own) is nn.Parameter
            assert torch.equal(own, other)
    assert all(isinstance(parameter, LazyTensor) for parameter in lazy.parameters()), "the whole was not made"


def test_one_whole_parameter_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    values = LazyTensor.values

    def watched(self: LazyTensor) -> torch.Tensor:
        assert all(each() is None for each in made), "the parameter before is still whole"
        found = values(self)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(LazyTensor, "values", watched)
    with LazyInitContext():
        natives = [nn.Linear(8, 8) for _ in range(3)]
    layers = [parallel.Linear.from_native(native) for native in natives]
    assert len(made) == 6
    assert all(layer.weight.untyped_storage().nbytes() == 4 * layer.weight.numel() for layer in layers)
