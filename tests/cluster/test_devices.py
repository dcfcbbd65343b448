# pyright: reportArgumentType=false
"""Processes take devices: each its own, or all of them are told."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from torch import distributed as dist

from colossal._src.cluster.rendezvous import WorldSpec, bind_device
from colossal.accelerator import Accelerator
from colossal.errors import ConfigError, LaunchError


@dataclass
class Host:
    """What a process sees of the devices of its host."""

    shown: list[str]
    is_known: bool = True
    taken: str = ""

    def set_device(self, index: int) -> None:
        if not 0 <= index < len(self.shown) and len(self.shown) != 1:
            raise ConfigError(f"Found local rank {index} and {len(self.shown)} devices.")
        self.taken = self.shown[0 if len(self.shown) == 1 else index]

    def identity(self) -> str | None:
        return self.taken if self.is_known else None


def take(hosts: list[Host], local_ranks: list[int], allow_same_device: bool = False) -> list[Exception | None]:
    store = dist.HashStore()

    def one(rank: int) -> Exception | None:
        try:
            bind_device(
                WorldSpec(store, rank, len(hosts), 20),
                hosts[rank],
                local_ranks[rank],
                allow_same_device=allow_same_device,
            )
        except (ConfigError, LaunchError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(one, range(len(hosts))))


def test_each_process_has_a_device_of_its_own() -> None:
    assert take([Host(["a", "b"]), Host(["a", "b"])], [0, 1]) == [None, None]
    assert take([Host(["a"]), Host(["b"])], [0, 1]) == [None, None]  # as a launcher shows each a single one
    assert take([Host(["a"], is_known=False), Host(["a"], is_known=False)], [0, 1]) == [None, None]


@pytest.mark.parametrize(
    ("hosts", "local_ranks"),
    [
        (lambda: [Host(["a"]) for _ in range(3)], [0, 1, 2]),  # three processes on a machine of one device
        (lambda: [Host(["a", "b"]), Host(["b", "c"]), Host(["a", "b"])], [0, 1, 0]),
    ],
)
def test_two_processes_on_one_device_are_refused_on_all_ranks(hosts: Callable[[], list[Host]], local_ranks) -> None:
    found = take(hosts(), local_ranks)
    assert len({str(error) for error in found}) == 1
    assert all(isinstance(error, LaunchError) for error in found)
    ranks = "0 and 1" if local_ranks == [0, 1, 2] else "0 and 2"
    assert f"Found ranks {ranks} on one: " in str(found[0])
    assert "Start fewer processes on this host" in str(found[0])
    assert take(hosts(), local_ranks, allow_same_device=True) == [None, None, None]


def test_more_processes_than_devices_are_refused_on_all_ranks() -> None:
    found = take([Host(["a", "b"]) for _ in range(3)], [0, 1, 2])
    assert isinstance(found[2], ConfigError)
    assert "Found local rank 2 and 2 devices" in str(found[2])
    for error in found[:2]:
        assert isinstance(error, LaunchError)
        assert "Found none for rank 2, whose error says why." in str(error)
    alone = take([Host(["a", "b"]) for _ in range(3)], [0, 1, 2], allow_same_device=True)
    assert [type(error) for error in alone] == [type(None), type(None), ConfigError]


def test_more_processes_than_devices_in_the_words_of_the_accelerator(monkeypatch) -> None:
    gpu = object.__new__(Accelerator)
    object.__setattr__(gpu, "name", "cuda")
    taken: list[int] = []
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setattr("torch.accelerator.set_device_index", taken.append)
    gpu.set_device(1)
    with pytest.raises(ConfigError, match=r"Found local rank 2 and 2 devices of type 'cuda'\. Start fewer processes"):
        gpu.set_device(2)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    gpu.set_device(5)
    assert taken == [1, 0]
