"""What is drawn later is what would have been drawn at once, and the generator goes on behind it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import init

from colossal._src.lazy.recipe import is_random
from colossal.lazy import LazyInitContext

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [1, 7, 15, 16, 17, 1000, 65537]
FILLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": lambda tensor: init.uniform_(tensor, -1, 2),
    "normal_": lambda tensor: init.normal_(tensor, 1, 0.5),
    "trunc_normal_": init.trunc_normal_,
    "constant_": lambda tensor: init.constant_(tensor, 0.3),
    "ones_": init.ones_,
    "zeros_": init.zeros_,
    "exponential_": lambda tensor: tensor.exponential_(),
    "bernoulli_": lambda tensor: tensor.bernoulli_(0.3),
    "log_normal_": lambda tensor: tensor.log_normal_(),
    "random_": lambda tensor: tensor.random_(0, 5),
}
MATRICES: dict[str, Callable[[torch.Tensor], Any]] = {
    "xavier_uniform_": init.xavier_uniform_,
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": init.kaiming_uniform_,
    "kaiming_normal_": lambda tensor: init.kaiming_normal_(tensor, mode="fan_out", nonlinearity="relu"),
    "orthogonal_": init.orthogonal_,
    "sparse_": lambda tensor: init.sparse_(tensor, 0.2),
    "eye_": init.eye_,
    "dirac_": lambda tensor: init.dirac_(tensor[:, :, None]),
}
WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda weight: weight.t(),
    "every second column": lambda weight: weight[:, ::2],
    "rows": lambda weight: weight[3:7],
    "one chunk of columns": lambda weight: weight.chunk(3, dim=1)[1],
    "nothing": lambda weight: weight[:0],
}


def filled(size: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    tensor = torch.empty(size, dtype=dtype)
    with torch.no_grad():
        fill(tensor)
    return [tensor, torch.rand(3), torch.randn(3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FILLS)
def test_fills(name: str, dtype: torch.dtype, same_tensors: Callable[..., None]) -> None:
    for size in SIZES:
        same_tensors(lambda size=size: filled(size, dtype, FILLS[name]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name: str, dtype: torch.dtype, same_tensors: Callable[..., None]) -> None:
    if name == "orthogonal_" and dtype.itemsize == 2:
        pytest.skip("torch has no QR decomposition for it")

    def build() -> list[torch.Tensor]:
        weights = [torch.empty(shape, dtype=dtype) for shape in ((1, 1), (3, 5), (17, 6), (4, 4), (40, 30))]
        return [*[MATRICES[name](weight) for weight in weights], *weights, torch.randn(2)]

    same_tensors(build)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("fill", ["uniform_", "normal_", "trunc_normal_"])
def test_windows(fill: str, window: str, dtype: torch.dtype, same_tensors: Callable[..., None]) -> None:
    def build() -> list[torch.Tensor]:
        weight = torch.full((12, 20), 0.25, dtype=dtype)
        FILLS[fill](WINDOWS[window](weight))
        return [weight, torch.randn(20)]

    same_tensors(build)


def test_every_function_of_init_is_here() -> None:
    known = {*FILLS, *MATRICES}
    public = {name for name in dir(init) if name.endswith("_") and not name.startswith("_")}
    assert public <= known, public - known


def draws(generator: torch.Generator | None) -> Iterator[torch.Tensor]:
    weights, probabilities = torch.arange(1.0, 6.0), torch.full((40,), 0.3)
    for _ in range(2):
        yield torch.rand(5, generator=generator)
        yield torch.rand(70000, generator=generator)
        yield torch.randn(5, generator=generator)
        yield torch.randn(21, generator=generator, dtype=torch.float64)
        yield torch.randint(0, 9, (11,), generator=generator)
        yield torch.randperm(13, generator=generator)
        yield torch.bernoulli(probabilities, generator=generator)
        yield torch.multinomial(weights, 3, generator=generator)
        yield torch.poisson(weights, generator=generator)
        yield torch.normal(weights, 2.0, generator=generator)
        yield torch.empty(33).normal_(generator=generator)
        yield torch.empty(9, 9).t()[::2].uniform_(generator=generator)


@pytest.mark.parametrize("seed", [None, 11])
def test_draws(seed: int | None, same_tensors: Callable[..., None]) -> None:
    same_tensors(lambda: list(draws(None if seed is None else torch.Generator().manual_seed(seed))))


def test_a_generator_of_ones_own_is_behind_where_it_would_be() -> None:
    states = []
    for lazily in (False, True):
        generator = torch.Generator().manual_seed(3)
        if lazily:
            with LazyInitContext():
                made = list(draws(generator))
        else:
            made = list(draws(generator))
        states.append(generator.get_state())
        for each in made if lazily else ():
            each.values()
        assert torch.equal(states[-1], generator.get_state())
    assert torch.equal(*states)


def test_draws_like_others_and_dropout(same_tensors: Callable[..., None]) -> None:
    def build() -> list[torch.Tensor]:
        ones = torch.ones(7, 5)
        return [
            torch.rand_like(ones),
            torch.randn_like(ones.t()),
            torch.randint_like(ones, 9),
            torch.randn(9, dtype=torch.cfloat),
            nn.functional.dropout(ones, 0.5),
            nn.functional.rrelu(-ones, training=True),
            torch.distributions.Beta(0.5, 0.5, validate_args=False).sample((3,)),
        ]

    same_tensors(build)


def test_seeds_that_are_set_while_building(same_tensors: Callable[..., None]) -> None:
    def build() -> list[torch.Tensor]:
        first = torch.randn(5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            inner = torch.randn(5)
        torch.manual_seed(10)
        return [first, inner, torch.randn(5)]

    same_tensors(build)


def test_whatever_takes_a_generator_is_random() -> None:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    overloads = [getattr(each, name) for each in packets if hasattr(each, "overloads") for name in each.overloads()]
    drawing = [each for each in overloads if any("Generator" in str(a.type) for a in each._schema.arguments)]
    assert len(drawing) > 50
    assert not [each for each in drawing if not is_random(each)]
