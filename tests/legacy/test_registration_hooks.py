"""Ranks that are threads build models at the same time, and the hooks of each see its own modules only."""

import sys
from collections.abc import Iterator

import pytest
from torch import distributed as dist
from torch import nn

from colossal.legacy.pipeline import PipelinableContext
from colossal.legacy.tensor import ColoInitContext
from colossal.testing import run_threads


@pytest.fixture(autouse=True)
def _threads_that_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_rank_enters_and_leaves_while_others_build() -> None:
    def program() -> set[str]:
        kinds = set()
        for _ in range(200):
            with ColoInitContext(device="cpu"):
                layer = nn.Linear(1, 1)
            kinds |= {type(each).__name__ for each in layer.parameters()}
        return kinds

    assert run_threads(program, 4) == [{"ColoParameter"}] * 4


def test_a_rank_partitions_the_model_that_it_built_itself() -> None:
    def program() -> list[int]:
        rank, found = dist.get_rank(), []
        for _ in range(20):
            with PipelinableContext(policy="uniform") as pipelinable:
                model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(rank + 2)))
            pipelinable.to_layer_list()
            found.append(pipelinable.layers_count)
            assert len(model) == rank + 2
        return found

    assert run_threads(program, 3) == [[rank + 2] * 20 for rank in range(3)]
