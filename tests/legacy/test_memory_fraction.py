"""How much memory a process may use, by the names of older programs."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from colossal.accelerator import get_current_device
from colossal.errors import ConfigError

memory: Any = importlib.import_module("colossal.utils.memory")


@pytest.fixture(autouse=True)
def full_memory() -> Iterator[None]:
    yield
    memory.colo_set_process_memory_fraction(1.0)


def test_a_fraction_divides_what_a_process_may_use() -> None:
    device = get_current_device()
    full = memory.colo_device_memory_capacity(device)
    memory.colo_set_process_memory_fraction(0.5)
    assert memory.colo_device_memory_capacity(device) == full // 2
    assert memory.colo_device_memory_capacity(str(device)) == full // 2


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.5])
def test_a_fraction_is_between_nothing_and_everything(ratio: float) -> None:
    with pytest.raises(ConfigError, match="greater than 0 and at most 1. Found"):
        memory.colo_set_process_memory_fraction(ratio)
