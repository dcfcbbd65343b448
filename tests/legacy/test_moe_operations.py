"""Operations of experts that programs write by themselves: exchanges of rows, numbers of tokens, scaled gradients."""

import importlib
from typing import Any

import pytest
import torch
from torch import distributed as dist

from colossal.errors import ConfigError, ShapeError, UnsupportedError
from colossal.testing import run_threads

operations: Any = importlib.import_module("colossal.moe._operation")
SENT = [[1, 2], [0, 3]]
"""How many rows each rank sends to each."""


def rows_between(source: int, target: int) -> torch.Tensor:
    return 100.0 * source + 10.0 * target + torch.arange(SENT[source][target], dtype=torch.float64)[:, None]


@pytest.mark.parametrize("is_default", [True, False])
def test_uneven_rows_reach_their_ranks_and_gradients_return(is_default: bool) -> None:
    def program() -> None:
        rank = dist.get_rank()
        own = torch.cat([rows_between(rank, target) for target in range(2)]).requires_grad_()
        arriving = [SENT[source][rank] for source in range(2)]
        group = None if is_default else dist.group.WORLD
        found, handle = operations.all_to_all_uneven(own, SENT[rank], arriving, group)
        assert handle is None
        assert torch.equal(found, torch.cat([rows_between(source, rank) for source in range(2)]))
        (found**2).sum().backward()
        assert own.grad is not None
        assert torch.equal(own.grad, 2 * own.detach())

    run_threads(program, 2)


def test_rows_are_split_evenly_by_default_and_sizes_must_fit() -> None:
    def program() -> list[float]:
        x = torch.arange(4.0) + 10 * dist.get_rank()
        for sizes in ([4], [1, 2]):
            with pytest.raises(ShapeError, match="Found 4 rows"):
                operations.all_to_all_uneven(x, sizes)
        for option in ("overlap", "fp8_communication"):
            with pytest.raises(UnsupportedError, match=f"{option}=True"):
                operations.all_to_all_uneven(x, **{option: True})
        return operations.all_to_all_uneven(x)[0].tolist()

    assert run_threads(program, 2) == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]


def test_tokens_of_an_expert_are_numbered() -> None:
    chosen = torch.tensor([[1, 0], [1, 0], [0, 1], [1, 0]])
    numbers = operations.moe_cumsum(chosen, use_kernel=True)
    assert numbers[chosen.bool()].tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("name", "sizes", "factor"),
    [
        ("EPGradScalerIn", (4,), 4.0),
        ("EPGradScalerOut", (4,), 0.25),
        ("DPGradScalerIn", (4, 1), 0.25),
        ("DPGradScalerOut", (4, 1), 4.0),
    ],
)
def test_gradients_are_scaled(name: str, sizes: tuple[int, ...], factor: float) -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    made = getattr(operations, name).apply(x, *sizes)
    assert torch.equal(made, x)
    made.backward(torch.arange(3.0, dtype=torch.float64))
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, factor, 2 * factor]


def test_an_expert_without_tokens_is_left_out() -> None:
    with pytest.raises(ConfigError, match="Leave the expert out"):
        operations.DPGradScalerIn.apply(torch.ones(1), 2, 0)


def test_what_has_no_counterpart_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"colossal\.nn\.moe\.dispatch"):
        _ = operations.MoeDispatch
