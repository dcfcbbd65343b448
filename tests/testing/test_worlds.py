import os
import time
from functools import partial

import pytest
import torch
from torch import distributed as dist

from colossal.cluster import ParallelMesh, current_mesh
from colossal.errors import CommunicationError
from colossal.testing import (
    TOLERANCES,
    WorldError,
    assert_close,
    assert_same_on_all_ranks,
    fake_world,
    run_processes,
    run_threads,
)

run_fresh = partial(run_processes, fresh=True)  # processes that serve several calls: test_reuse.py


def add_ranks(offset: int) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def threads_of_a_rank() -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 is unwell")
    dist.barrier()


def fail_on_rank_1_after_its_peer() -> None:
    if dist.get_rank() == 0:
        raise CommunicationError("all_reduce cannot go on: rank 1 has left the group.")
    time.sleep(0.5)
    raise ValueError("rank 1 is unwell")


def wait_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(100)
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def environment_of_a_rank() -> str:
    return os.environ["SOME_RANK"]


def own_tensor_differs() -> None:
    assert_same_on_all_ranks(torch.tensor([1.0, float(dist.get_rank())]))


TENSORS = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool)},
    **{str(dtype): torch.rand(2, 3).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float64, torch.complex64)},
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "column": torch.arange(12.0).reshape(3, 4)[:, 1],
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "with gradient": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
}


def same(value: object) -> object:
    return value


def test_tensors_go_there_and_back_as_they_are() -> None:
    (found,) = run_fresh(same, 1, TENSORS)
    for name, tensor in TENSORS.items():
        assert type(found[name]) is type(tensor), name
        assert (found[name].dtype, found[name].shape, found[name].device) == (tensor.dtype, tensor.shape, tensor.device)
        assert found[name].requires_grad == tensor.requires_grad, name
        if name not in ("meta", "sparse"):
            assert torch.equal(found[name].to(torch.complex128), tensor.to(torch.complex128)), name
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))


def test_tensors_that_share_memory_share_it_again() -> None:
    one = torch.ones(4)
    (((first, second), other),) = run_fresh(same, 1, ([one, one.view(2, 2)], torch.ones(4)))
    first.fill_(3)
    assert torch.equal(second, torch.full((2, 2), 3.0))
    assert torch.equal(other, torch.ones(4))


@pytest.mark.parametrize("run", [run_fresh, run_threads], ids=["processes", "threads"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_back_in_rank_order(run, size) -> None:
    expected = sum(range(size)) + 10 * size
    assert run(add_ranks, size, 10) == [(rank, expected) for rank in range(size)]


@pytest.mark.parametrize("run", [run_fresh, run_threads], ids=["processes", "threads"])
def test_the_error_of_a_rank_is_reported_with_its_traceback(run) -> None:
    with pytest.raises(
        WorldError, match=r"(?s)^Rank 1 of 2: \w+: rank 1 is unwell\n.*fail_on_rank_1.*rank 1 is unwell"
    ):
        run(fail_on_rank_1, 2)


def test_the_first_line_is_the_cause_and_not_that_a_peer_was_lost() -> None:
    with pytest.raises(WorldError, match=r"^Rank 1 of 2: ValueError: rank 1 is unwell\n"):
        run_fresh(fail_on_rank_1_after_its_peer, 2)


@pytest.mark.slow
def test_a_rank_that_hangs_is_found_at_its_line_and_killed() -> None:
    with pytest.raises(WorldError, match=r"(?s)^Rank 1 of 2: no end within \d+ s\. It was at File .*hang_on_rank_1"):
        run_fresh(hang_on_rank_1, 2, timeout_seconds=3)


@pytest.mark.slow
def test_threads_of_which_one_calls_no_collective_end_with_its_line() -> None:
    with pytest.raises(WorldError, match=r"(?s)^Rank 0 of 2: no end within \d+ s\. It was at File .*wait_on_rank_0"):
        run_threads(wait_on_rank_0, 2, timeout_seconds=1)
    assert run_threads(add_ranks, 2, 10) == [(0, 21), (1, 21)], "the next world is as before"


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(WorldError, match="^Rank 1 of 2: The process died with exit code 7"):
        run_fresh(die_on_rank_1, 2)


def test_each_process_computes_on_one_thread() -> None:
    assert run_fresh(threads_of_a_rank, 2, form=False) == [(1, "1"), (1, "1")]


def test_the_environment_knows_the_rank() -> None:
    assert run_fresh(environment_of_a_rank, 2, form=False, environment={"SOME_RANK": "r{rank}"}) == ["r0", "r1"]


def test_a_fake_world_has_any_size() -> None:
    with fake_world(512, rank=200):
        mesh = ParallelMesh(pp=8, tp=8)
        assert (mesh.size("dp"), mesh.rank("pp")) == (8, 200 // 64)
        assert current_mesh().shape["dp"] == 512


def test_ranks_that_differ_are_named() -> None:
    with pytest.raises(WorldError, match="Found rank [01] apart by up to 1"):
        run_threads(own_tensor_differs, 2)


def test_tolerance_depends_on_the_dtype() -> None:
    one = torch.ones(3)
    off = one + TOLERANCES[torch.float32].rtol * 10
    with pytest.raises(AssertionError, match="the loss"):
        assert_close(off, one, "the loss")
    assert_close(off.bfloat16(), one.bfloat16())
