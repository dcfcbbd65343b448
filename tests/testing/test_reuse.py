# pyright: reportAttributeAccessIssue=false
"""Processes that serve several calls, and what must not pass from one call to the next."""

import logging
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from colossal._src.cluster import ambient_mesh
from colossal._src.testing.processes import kept_pids
from colossal.cluster import ParallelMesh
from colossal.testing import WorldError, reuse_processes, run_processes

pytestmark = pytest.mark.slow

CALLS: list[int] = []


@pytest.fixture(autouse=True)
def _own_processes() -> Iterator[None]:
    """A test of this file starts with no process, and leaves none."""
    before = kept_pids()
    with reuse_processes():
        yield
    assert kept_pids() == before


def pid(*_: Any) -> int:
    return os.getpid()


def total() -> tuple[int, float, list[int]]:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return os.getpid(), value.item(), dist.get_process_group_ranks(dist.group.WORLD)


# ------------------------------------------------------------------------------------------ which process serves


def test_a_rank_is_the_same_process_in_worlds_of_all_sizes() -> None:
    pids = {}
    for size in (2, 1, 4, 3, 4):
        results = run_processes(total, size)
        assert [result[1:] for result in results] == [(size * (size + 1) / 2, list(range(size)))] * size
        pids[size] = [result[0] for result in results]
    assert pids[1] == pids[4][:1]
    assert pids[2] == pids[4][:2]
    assert pids[3] == pids[4][:3]


@pytest.mark.parametrize("options", [{"fresh": True}, {"form": False}, {"environment": {"A": "1"}}])
def test_some_calls_get_new_processes(options) -> None:
    kept = run_processes(pid, 2)
    assert not set(run_processes(pid, 2, **options)) & set(kept)
    assert run_processes(pid, 2) == kept


def test_outside_each_call_gets_new_processes() -> None:
    with reuse_processes():
        inner = run_processes(pid, 1)
    assert {process.pid for process in multiprocessing.active_children()}.isdisjoint(inner)
    assert run_processes(pid, 1) != inner


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 is unwell")
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(100)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (fail_on_rank_1, "(?s)Rank 1.*fail_on_rank_1.*rank 1 is unwell"),
        (hang_on_rank_1, "(?s)Rank 1: It did not come to an end.*hang_on_rank_1"),
        (die_on_rank_1, "(?s)first one first.*Rank 1: The process died with exit code 7"),
    ],
)
def test_a_world_that_fails_is_not_used_again(function, found) -> None:
    before = run_processes(pid, 3)
    with pytest.raises(WorldError, match=found):
        run_processes(function, 2, timeout_seconds=3)
    assert kept_pids() >= {before[2]}
    assert not kept_pids() & set(before[:2])
    after = [result[0] for result in run_processes(total, 3)]
    assert not set(after) & set(before[:2])


def test_a_process_that_dies_between_calls_is_replaced() -> None:
    first, second = run_processes(pid, 2)
    os.kill(second, signal.SIGKILL)
    while Path(f"/proc/{second}/stat").exists() and " Z " not in Path(f"/proc/{second}/stat").read_text():
        time.sleep(0.01)
    results = run_processes(total, 2)
    assert [value for _, value, _ in results] == [3.0, 3.0]
    assert {first, second} & {result[0] for result in results} == {first}


# ------------------------------------------------------------------------------------------ what is restored


def disturb() -> None:
    ParallelMesh(tp=2).__enter__()
    dist.new_group([0])
    torch.manual_seed(dist.get_rank() + 1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.autograd.set_detect_anomaly(True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_printoptions(precision=1)
    os.environ["LEFT_BEHIND"] = "1"
    del os.environ["OMP_NUM_THREADS"]
    os.chdir("/")
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("left.behind").addHandler(logging.NullHandler())
    CALLS.append(1)


def look() -> dict[str, Any]:
    return {
        "seeds": (torch.initial_seed() != dist.get_rank() + 1, torch.rand(2).tolist(), np.random.rand()),  # noqa: NPY002
        "random": random.random(),  # noqa: S311
        "dtype": torch.tensor(0.5).dtype,
        "device": torch.get_default_device().type,
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "print": str(torch.tensor(1 / 3)),
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "filters": [*warnings.filters],
        "signal": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "loggers": (logging.root.level, logging.getLogger("left.behind").handlers),
        "module": CALLS,
        "mesh": ambient_mesh(),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def test_what_a_function_changes_is_restored() -> None:
    before, kept = run_processes(look, 2), run_processes(pid, 2)
    run_processes(disturb, 2)
    after = run_processes(look, 2)
    assert run_processes(pid, 2) == kept
    for old, new in zip(before, after, strict=True):
        assert new == old
    fresh = run_processes(look, 2, fresh=True)
    for old, new in zip(before, fresh, strict=True):
        assert old | {"random": 0} == new | {"random": 0}, "the first call of a process and a fresh one differ"


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()


def leave_a_process() -> None:
    subprocess.Popen(["sleep", "1"])


def replace_a_function() -> None:
    dist.all_reduce = len


def replace_a_method() -> None:
    ParallelMesh.size = len


def enter_a_mode() -> None:
    torch.overrides.TorchFunctionMode().__enter__()


@pytest.mark.parametrize(
    "function",
    [leave_a_thread, leave_a_process, replace_a_function, replace_a_method, enter_a_mode],
    ids=lambda each: each.__name__,
)
def test_a_process_with_something_left_is_replaced(function) -> None:
    before = run_processes(pid, 2)
    run_processes(function, 1)
    after = [result[0] for result in run_processes(total, 2)]
    assert before[0] not in after
    assert before[1] in after


def gather_over_columns(names: tuple[str, str], shape: tuple[int, int]) -> list[float]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    tensor = distribute_tensor(torch.arange(8.0), mesh[names[1]], [Shard(0)])
    return (tensor + tensor).full_tensor().tolist()


def test_meshes_of_earlier_worlds_are_forgotten() -> None:
    doubled = [2.0 * value for value in range(8)]
    for shape, names in (((2, 2), ("a", "b")), ((1, 4), ("a", "b")), ((2, 2), ("b", "a")), ((4, 1), ("a", "b"))):
        assert run_processes(gather_over_columns, 4, names, shape) == [doubled] * 4
    assert len(set(run_processes(pid, 4))) == 4
