# pyright: reportArgumentType=false
"""Initializers with fans draw from the documented distributions, and layers call both kinds."""

import math

import pytest
import torch

from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError
from colossal.legacy.nn import init
from colossal.nn import Classifier, Embedding, Linear, PatchEmbedding
from colossal.testing import run_processes

FANS = {"fan_in": 300, "fan_out": 200}


def filled(fill, *shape: int, **fans: int) -> torch.Tensor:
    torch.manual_seed(0)
    tensor = torch.empty(*(shape or (200, 300)))
    assert fill(tensor, **(fans or FANS)) is tensor
    return tensor


def test_constants_and_plain_distributions() -> None:
    assert filled(init.zeros_()).abs().max() == 0
    assert filled(init.ones_()).min() == 1
    assert -2 <= filled(init.uniform_(-2.0, 5.0)).min() < -1.99
    assert 4.99 < filled(init.uniform_(-2.0, 5.0)).max() <= 5
    normal = filled(init.normal_(3.0, 0.5))
    assert normal.mean().item() == pytest.approx(3.0, abs=0.01)
    assert normal.std().item() == pytest.approx(0.5, rel=0.02)
    truncated = filled(init.trunc_normal_(0.0, 1.0, -0.5, 0.25))
    assert -0.5 <= truncated.min() < -0.49
    assert 0.24 < truncated.max() <= 0.25


@pytest.mark.parametrize(
    ("fill", "bound"),
    [
        (init.kaiming_uniform_(a=math.sqrt(5)), math.sqrt(1 / 300)),
        (init.kaiming_uniform_(mode="fan_out", nonlinearity="relu"), math.sqrt(6 / 200)),
        (init.xavier_uniform_(), math.sqrt(6 / 500)),
        (init.xavier_uniform_(a=1.0, scale=1.0, gain=2.0), 2 * math.sqrt(1 / 500)),
        (init.lecun_uniform_(), math.sqrt(3 / 300)),
    ],
)
def test_bounds_of_uniform_distributions(fill, bound) -> None:
    found = filled(fill)
    assert -bound <= found.min() < -0.99 * bound
    assert 0.99 * bound < found.max() <= bound


@pytest.mark.parametrize(
    ("fill", "std"),
    [
        (init.kaiming_normal_(nonlinearity="relu"), math.sqrt(2 / 300)),
        (init.kaiming_normal_(mode="fan_out", nonlinearity="linear"), math.sqrt(1 / 200)),
        (init.xavier_normal_(), math.sqrt(2 / 500)),
        (init.xavier_normal_(scale=1.0, gain=3.0), 3 * math.sqrt(1 / 500)),
        (init.lecun_normal_(), math.sqrt(1 / 300)),
    ],
)
def test_standard_deviations_of_normal_distributions(fill, std) -> None:
    found = filled(fill)
    assert found.std().item() == pytest.approx(std, rel=0.02)
    assert found.mean().item() == pytest.approx(0.0, abs=0.02 * std)


def test_they_are_those_of_torch() -> None:
    for ours, theirs in (
        (init.kaiming_uniform_(a=0.1), lambda x: torch.nn.init.kaiming_uniform_(x, a=0.1)),
        (init.kaiming_normal_(mode="fan_out"), lambda x: torch.nn.init.kaiming_normal_(x, mode="fan_out")),
        (init.xavier_uniform_(gain=2.0), lambda x: torch.nn.init.xavier_uniform_(x, gain=2.0)),
        (init.xavier_normal_(), torch.nn.init.xavier_normal_),
    ):
        found = filled(ours)
        torch.manual_seed(0)
        assert torch.allclose(found, theirs(torch.empty(200, 300)))


def test_a_bias_has_the_bound_of_its_features_in() -> None:
    bound = math.sqrt(1 / 300)
    found = filled(init.xavier_uniform_(a=1.0, scale=1.0), 10_000)
    assert 0.99 * bound < found.max() <= bound


def test_a_missing_fan_and_an_unknown_mode_are_errors() -> None:
    for fill in (init.kaiming_uniform_(), init.xavier_normal_(), init.lecun_normal_(), init.lecun_uniform_()):
        with pytest.raises(ConfigError, match="This initializer needs fan_in"):
            fill(torch.empty(2, 2))
    with pytest.raises(ConfigError, match="This initializer needs fan_out"):
        init.kaiming_normal_(mode="fan_out")(torch.empty(2, 2), fan_in=3)
    with pytest.raises(ConfigError, match="The mode is the fan that counts"):
        init.kaiming_uniform_(mode="fan")


def build(mode: str) -> list[torch.Tensor]:
    """The full parameters that layers get, by initializers of both kinds."""
    torch.manual_seed(0)
    grid = {"tp": 4, "tp_mode": mode} if mode == "2d" else {"tp": 4}
    with ParallelMesh(**grid):
        layers = [
            Linear(8, 12, weight_initializer=init.xavier_uniform_(), bias_initializer=init.normal_(std=1e-3)),
            Linear(8, 12, weight_initializer=torch.nn.init.xavier_normal_, bias_initializer=torch.nn.init.zeros_),
            Classifier(8, 3, weight_initializer=init.zeros_(), bias_initializer=init.ones_()),
            Embedding(8, 4, weight_initializer=init.normal_(std=0.5)),
            PatchEmbedding(8, 4, 3, 8, weight_initializer=init.lecun_normal_(), bias_initializer=init.zeros_()),
        ]
        return [layer.full_parameter(name) for layer in layers for name in layer.layouts]


def test_layers_call_both_kinds_with_the_fans_of_the_full_layer() -> None:
    expected = None
    for mode in ("1d", "2d"):
        for found in run_processes(build, 4, mode):
            expected = expected or found
            assert all(map(torch.equal, found, expected))
    assert expected is not None
    assert 0.9 * math.sqrt(6 / 20) < expected[0].abs().max() <= math.sqrt(6 / 20)
