# pyright: reportMissingImports=false
"""Collectives in 8 bits give each rank what those of torch give, to the precision of the format."""

from typing import Any

import pytest
import torch
from torch import distributed as dist

from colossal.errors import ConfigError, ShapeError
from colossal.quantization.fp8 import all_gather_fp8, all_to_all_fp8, all_to_all_single_fp8, reduce_scatter_fp8
from colossal.testing import run_threads

RANKS = 3
# Half of the distance between two neighbours, as a part of the larger: 3 and 2 bits of mantissa.
PRECISION = {"e4m3": 2**-4, "e5m2": 2**-3}
FORMATS = pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2"])


def draw(source: int, target: int = 0, rows: int = 5) -> torch.Tensor:
    """Numbers between 1 and 2 times what differs by rank, so that none is rounded to a subnormal one."""
    generator = torch.Generator().manual_seed(10 * source + target)
    return (1 + torch.rand(rows, 3, generator=generator)) * 10.0 ** (source - target)


def check(found: torch.Tensor, expected: torch.Tensor, fp8_format: str) -> None:
    torch.testing.assert_close(found, expected, rtol=PRECISION[fp8_format], atol=0.0)
    assert not torch.equal(found, expected)  # they did travel in 8 bits


@FORMATS
@pytest.mark.parametrize("async_op", [True, False])
def test_all_ranks_gather_the_tensors_of_all(fp8_format: Any, async_op: bool) -> None:
    def program() -> None:
        found = [torch.empty(5, 3) for _ in range(RANKS)]
        handle = all_gather_fp8(found, draw(dist.get_rank()), fp8_format=fp8_format, async_op=async_op)
        assert (handle is not None) == async_op
        if handle is not None:
            handle.wait()
        for rank, each in enumerate(found):
            check(each, draw(rank), fp8_format)

    run_threads(program, RANKS)


@FORMATS
def test_each_rank_gets_a_sum(fp8_format: Any) -> None:
    def program() -> None:
        rank, found = dist.get_rank(), torch.empty(5, 3)
        reduce_scatter_fp8(found, [draw(rank, target) for target in range(RANKS)], dist.group.WORLD, fp8_format)
        check(found, sum(draw(source, rank) for source in range(RANKS)), fp8_format)  # type: ignore[arg-type]

    run_threads(program, RANKS)


@FORMATS
def test_each_rank_gets_a_tensor_of_each(fp8_format: Any) -> None:
    def program() -> None:
        rank = dist.get_rank()
        found = [torch.empty(1 + source, 3) for source in range(RANKS)]
        all_to_all_fp8(found, [draw(rank, target, 1 + rank) for target in range(RANKS)], fp8_format=fp8_format)
        for source, each in enumerate(found):
            check(each, draw(source, rank, 1 + source), fp8_format)

    run_threads(program, RANKS)


@FORMATS
def test_rows_go_to_their_ranks(fp8_format: Any) -> None:
    sizes = [[0, 2, 1], [3, 1, 2], [2, 2, 2]]

    def program() -> None:
        rank = dist.get_rank()
        arriving = [sizes[source][rank] for source in range(RANKS)]
        sent = torch.cat([draw(rank, target, rows) for target, rows in enumerate(sizes[rank])])
        found = torch.empty(sum(arriving), 3)
        all_to_all_single_fp8(found, sent, arriving, sizes[rank], fp8_format)
        check(found, torch.cat([draw(source, rank, rows) for source, rows in enumerate(arriving)]), fp8_format)
        equal, parts = torch.empty(6, 3), [draw(rank, target, 2) for target in range(RANKS)]
        all_to_all_single_fp8(equal, torch.cat(parts), fp8_format=fp8_format)
        check(equal, torch.cat([draw(source, rank, 2) for source in range(RANKS)]), fp8_format)

    run_threads(program, RANKS)


def test_what_does_not_fit_is_refused() -> None:
    def program() -> None:
        x = torch.ones(4, 3)
        with pytest.raises(ShapeError, match="each of 3 ranks. Found 2"):
            all_gather_fp8([x, x], x)
        with pytest.raises(ShapeError, match=r"Found 4 rows and the sizes \[1, 1, 1\]"):
            all_to_all_single_fp8(x, x)
        with pytest.raises(ConfigError, match="'e4m3' or 'e5m2'"):
            all_gather_fp8([x, x, x], x, fp8_format="e3m4")

    run_threads(program, RANKS)
