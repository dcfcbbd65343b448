"""What a command asks for: ranks, arguments, and whether a fork can stand for it."""

import os
import shlex

import pytest

from pagetest.warm.launch import Launch, read_launch

CORES = os.cpu_count() or 1


@pytest.mark.parametrize(
    ("command", "launch"),
    [
        ("python a.py", Launch(0, ("a.py",), True)),
        ("python -u a.py --lr 1 b.txt", Launch(0, ("a.py", "--lr", "1", "b.txt"), True)),
        ("python -W error a.py", Launch(0, ("a.py",), False)),
        ("torchrun --standalone a.py", Launch(1, ("a.py",), True)),
        ("torchrun --standalone --nproc_per_node=2 a.py --nnodes=3", Launch(2, ("a.py", "--nnodes=3"), True)),
        ("torchrun --standalone --nproc-per-node 4 --nnodes=1 a.py", Launch(4, ("a.py",), True)),
        ("python -m torch.distributed.run --standalone --nproc_per_node=2 a.py", Launch(2, ("a.py",), True)),
        ("torchrun --standalone --nproc_per_node=auto a.py", Launch(CORES, ("a.py",), False)),
        ("torchrun --standalone --nproc_per_node=2 --max-restarts=1 a.py", Launch(2, ("a.py",), False)),
        ("torchrun --standalone --nproc_per_node 2 --rdzv_endpoint localhost:0 a.py", Launch(2, ("a.py",), False)),
        ("colossal run --nproc_per_node 2 a.py", Launch(2, ("a.py",), False)),
    ],
)  # fmt: skip
def test_ranks_and_arguments(command, launch) -> None:
    assert read_launch(shlex.split(command)) == launch
