"""Special numbers and rare dtypes: reductions do what torch does with them, and moves leave them as they are."""

import pytest
import torch
from torch import distributed as dist

from colossal.testing import run_processes

INF, NAN = float("inf"), float("nan")
PAIRS = [
    *((0.0, -0.0), (-0.0, -0.0), (INF, 1.0), (INF, -INF), (NAN, 1.0), (1.0, NAN), (NAN, INF), (-1.0, 1.0)),
    *((65504.0, 16.0), (65504.0, 15.9), (2e38, 2e38), (3e38, -3e38), (6e-8, 6e-8), (1e-40, 1e-40), (1.0, 2.0**-9)),
]
SIZES = (1, 3, 700, 5000)
"""How often the pairs are repeated: from less than a vector to more than 32 KB."""


def operand(rank: int, dtype: torch.dtype, times: int) -> torch.Tensor:
    return torch.tensor([pair[rank] for pair in PAIRS], dtype=torch.float64).to(dtype).repeat(times)


def reduce_special_numbers(name: str) -> None:
    dtype, rank, op = getattr(torch, name), dist.get_rank(), dist.ReduceOp
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    for times in SIZES:
        left, right = (operand(each, dtype, times) for each in range(2))
        total = left.to(wide) + right.to(wide)
        for reduction, expected in (
            (op.SUM, total.to(dtype)),
            (op.AVG, (total / 2).to(dtype)),
            (op.MAX, torch.maximum(left, right)),
            (op.MIN, torch.minimum(left, right)),
        ):
            found = operand(rank, dtype, times)
            dist.all_reduce(found, reduction)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            is_negative = torch.signbit(found) | found.isnan()
            if reduction in (op.SUM, op.AVG):
                assert torch.equal(is_negative, torch.signbit(expected) | expected.isnan())


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_infinities_tiny_numbers_and_what_is_no_number_are_reduced_as_torch_does(name) -> None:
    run_processes(reduce_special_numbers, 2, name)


def wrap_around() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        for length in (5, 40_000):
            value = torch.full((length,), info.max, dtype=dtype)
            dist.all_reduce(value)
            assert (value == torch.full((length,), info.max, dtype=dtype) * 2).all()
            least = torch.full((length,), (info.min, info.max)[dist.get_rank()], dtype=dtype)
            dist.all_reduce(least, dist.ReduceOp.MIN)
            assert (least == info.min).all()


def move_every_dtype() -> int:
    """Move bytes that mean anything, in tensors of every dtype."""
    rank, moved = dist.get_rank(), 0
    for dtype in sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str):
        if str(dtype).startswith(("torch.q", "torch.bits", "torch.complex")):  # quantised, or taken apart by torch
            continue
        rows = [torch.full((dtype.itemsize * 6,), 37 + each, dtype=torch.uint8).view(dtype) for each in range(2)]
        if dtype is torch.bool:
            rows = [torch.tensor([bool(each)] * 6) for each in range(2)]
        moved += 1
        own, other, room = rows[rank], rows[1 - rank], torch.empty_like(rows[0])
        work = dist.isend(own, 1 - rank)
        dist.recv(room, 1 - rank)
        assert work is not None
        work.wait()
        assert torch.equal(room.view(torch.uint8), other.view(torch.uint8))
        parts = [torch.empty_like(own) for _ in rows]
        dist.all_gather(parts, own)
        assert torch.equal(
            torch.stack([part.view(torch.uint8) for part in parts]).flatten(),
            torch.cat([row.view(torch.uint8) for row in rows]),
        )
        dist.broadcast(own, 1)
        assert torch.equal(own.view(torch.uint8), rows[1].view(torch.uint8))
    return moved


def move_and_wrap() -> int:
    wrap_around()
    return move_every_dtype()


def test_whole_numbers_wrap_around_and_every_dtype_is_moved() -> None:
    assert min(run_processes(move_and_wrap, 2)) >= 15
