"""Sums whose terms travel in 8 bits: how far they are off, what infinities become, and what is sent."""

import pytest
import torch
from torch import distributed as dist

from colossal._src.comm import Partition
from colossal._src.comm.fp8 import BLOCK, all_reduce_fp8, dequantize_fp8, fp8_nbytes, quantize_fp8
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.testing import run_processes, run_threads

LARGEST, SMALLEST = 1 / 16, 2.2e-6  # errors: of the number itself, and of the largest in its block


def numbers(rank: int, numel: int = 3 * BLOCK + 10) -> torch.Tensor:
    """Of very different magnitudes."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator) * torch.logspace(-6, 4, numel)


def allowed(values: torch.Tensor) -> torch.Tensor:
    """How far each number may be off after one rounding."""
    largest = torch.cat([block.abs().max().expand(len(block)) for block in values.split(BLOCK)])
    return LARGEST * values.abs() + SMALLEST * largest


@pytest.mark.parametrize("numel", [1, 3, BLOCK, BLOCK + 1, 300 * BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_rounded_to_a_sixteenth(numel: int, dtype: torch.dtype) -> None:
    rows = torch.stack([numbers(0, numel), numbers(1, numel)]).to(dtype)
    packed = quantize_fp8(rows)
    assert packed.shape == (2, fp8_nbytes(numel))
    for row, found in zip(rows.float(), dequantize_fp8(packed, numel), strict=True):
        assert ((found - row).abs() <= allowed(row)).all()


def test_a_block_of_zeros_is_zero_and_one_with_an_infinity_is_nan() -> None:
    rows = torch.zeros(1, 3 * BLOCK)
    rows[0, BLOCK], rows[0, -1] = float("inf"), float("nan")
    found = dequantize_fp8(quantize_fp8(rows), 3 * BLOCK)[0]
    assert not found[:BLOCK].any()
    assert found[BLOCK:].isnan().all()


def total_of_all(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    group = dist.group.WORLD
    assert group is not None
    total = all_reduce_fp8(numbers(dist.get_rank(), numel), group)
    gathered = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, total)
    return total, torch.stack(gathered)


@pytest.mark.parametrize("run", [run_threads, run_processes])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_same_sum(run, size: int) -> None:
    numel = 3 * BLOCK + 10
    length = -(-numel // size)  # of what a rank sums up, where blocks begin anew
    terms = [numbers(rank, numel) for rank in range(size)]
    exact, bounds = torch.stack(terms).sum(0), torch.stack([term.abs() for term in terms]).sum(0) * (1 + LARGEST)
    once = sum(torch.cat([allowed(part) for part in term.split(length)]) for term in terms)
    twice = once + torch.cat([allowed(part) for part in bounds.split(length)])  # the sum is rounded as well
    for total, gathered in run(total_of_all, size, numel):
        assert ((total - exact).abs() <= twice).all()
        assert all(torch.equal(other, total) for other in gathered)


def sum_segments(replicas: int, gives_scratch: bool) -> tuple[torch.Tensor, int]:
    mesh = ParallelMesh(dp=4)
    group, others = (mesh.group("dp"), None) if replicas == 1 else mesh.blocks("dp", 4 // replicas)
    partition = Partition(group, others, compress_fp8=True)
    buffer = numbers(dist.get_rank(), 4 * BLOCK)
    own, scratch = partition.segment(buffer), torch.empty(partition.scratch_numel(buffer)) if gives_scratch else None
    with CommCounter() as counter:
        partition.start_reduce_scatter(buffer, own, scratch).wait()
    return own.clone(), sum(counter.bytes.values())


@pytest.mark.parametrize("gives_scratch", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_partition_sums_in_a_quarter_of_the_bytes(replicas: int, gives_scratch: bool) -> None:
    terms = [numbers(rank, 4 * BLOCK) for rank in range(4)]
    exact = torch.stack(terms).sum(0)
    # With replicas the sums of a group are rounded as the terms were, and their sum once more.
    off = sum(allowed(term) for term in terms) * (1 if replicas == 1 else 1 + (1 + LARGEST) + (1 + LARGEST) ** 2)
    found = run_threads(sum_segments, 4, replicas, gives_scratch)
    segments = 4 // replicas
    length = 4 * BLOCK // segments
    for rank, (own, num_bytes) in enumerate(found):
        at = rank % segments * length
        assert ((own - exact[at : at + length]).abs() <= off[at : at + length]).all()
        full = 4 * 4 * BLOCK * (segments - 1) // segments + (replicas > 1) * 4 * length
        assert num_bytes == pytest.approx(full / 4, rel=0.01)
