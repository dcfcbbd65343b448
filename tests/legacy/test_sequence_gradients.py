"""A program that shards sequences itself sums the gradients that it marked, and trains as one process."""

import importlib
from typing import Any

import pytest
import torch
from equality import assert_equal
from torch import distributed as dist
from torch import nn

from colossal.errors import ConfigError
from colossal.testing import run_processes

UTILS: Any = importlib.import_module("colossal.shardformer.layer.utils").SeqParallelUtils


def norm_and_head() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).double()


def tokens() -> torch.Tensor:
    return torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sum_gradients(as_list: bool) -> list[torch.Tensor]:
    model = norm_and_head()
    for parameter in model.parameters():
        assert not UTILS.is_sp_partial_derived_param(parameter)
        UTILS.marked_as_sp_partial_derived_param(parameter)
    model(tokens().chunk(3, dim=1)[dist.get_rank()]).square().sum().backward()
    given: Any = {"grads": [each.grad for each in model.parameters()]} if as_list else {"model": model}
    UTILS.allreduce_partial_data_grad(dist.group.WORLD, **given)
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("as_list", [False, True])
def test_gradients_of_shards_of_sequences_are_summed(as_list: bool) -> None:
    alone = norm_and_head()
    alone(tokens()).square().sum().backward()
    for grads in run_processes(sum_gradients, 3, as_list):
        for grad, parameter in zip(grads, alone.parameters(), strict=True):
            assert parameter.grad is not None
            assert_equal(grad, parameter.grad, "gradient")


def sum_one() -> list[float]:
    model = norm_and_head()
    UTILS.marked_as_sp_partial_derived_param(model[0].weight)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    UTILS.allreduce_partial_data_grad(dist.group.WORLD, model=model)
    UTILS.allreduce_partial_data_grad(None, model=model)
    return [each.grad.flatten()[0].item() for each in model.parameters() if each.grad is not None]


def test_only_what_is_marked_is_summed() -> None:
    assert run_processes(sum_one, 2) == [[2.0, 1.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize(("given", "found"), [({}, "neither"), ({"model": nn.Linear(1, 1), "grads": []}, "both")])
def test_one_of_model_and_gradients_is_given(given: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=f"Found {found}"):
        UTILS.allreduce_partial_data_grad(None, **given)
