"""How many reductions are under way at once, by the device and by what the user said."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from colossal._src.zero import ZeroConfig
from colossal._src.zero.reducer import Reducer


class Told:
    """In place of a bucket: notes when its reduction begins and ends."""

    def __init__(self, name: int, device: str, config: ZeroConfig, notes: list[tuple[str, int]]) -> None:
        self.name, self.notes = name, notes
        self.device, self.keeps_gradients = torch.device(device), config.keeps_gradients

    def start_reduction(self) -> Iterator[int]:
        self.notes.append(("start", self.name))
        yield 8

    def finish_reduction(self) -> Iterator[int]:
        self.notes.append(("finish", self.name))
        yield from ()


def notes_of(device: str, config: ZeroConfig, reserve: Any = None) -> list[tuple[str, int]]:
    notes: list[tuple[str, int]] = []
    buckets: Any = [Told(name, device, config, notes) for name in range(4)]
    reducer = Reducer(config, reserve)
    reducer.watch([])
    reducer._places = {bucket: place for place, bucket in enumerate(buckets)}
    reducer.reduce(buckets)
    return notes


def most_under_way(notes: list[tuple[str, int]]) -> int:
    under_way = most = 0
    for what, _ in notes:
        under_way += 1 if what == "start" else -1
        most = max(most, under_way)
    return most


@pytest.mark.parametrize(
    ("device", "stage", "reserve", "most"),
    [
        ("cuda", 1, None, 4),
        ("cuda", 2, None, 2),
        ("cuda", 1, print, 1),
        ("cuda", 2, print, 1),
        ("cpu", 1, None, 1),
        ("cpu", 2, None, 1),
    ],
)
def test_so_many_reductions_are_under_way(device: str, stage: int, reserve: Any, most: int) -> None:
    asked: list[int] = []
    notes = notes_of(device, ZeroConfig(stage=stage), reserve and asked.append)
    assert most_under_way(notes) == most
    for kind in ("start", "finish"):
        assert [name for what, name in notes if what == kind] == [0, 1, 2, 3]
    assert asked == ([8] * 4 if reserve else [])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_without_overlap_each_ends_before_the_next_begins(device: str) -> None:
    notes = notes_of(device, ZeroConfig(overlap_communication=False))
    assert notes == [(what, name) for name in range(4) for what in ("start", "finish")]
