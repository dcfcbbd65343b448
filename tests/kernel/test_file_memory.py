"""Tensors that lie in a file."""

import gc
from pathlib import Path

import pytest
import torch

from colossal._src.offload import FileBackedBuffer
from colossal.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_outlive_their_pages(tmp_path: Path, dtype: torch.dtype) -> None:
    memory = FileBackedBuffer(tmp_path, 10_000, dtype)
    assert memory.tensor.shape == (10_000,)
    assert not memory.tensor.any(), "it begins as zeros"
    values = torch.arange(10_000).to(dtype)
    memory.tensor.copy_(values)
    memory.drop_page_cache()
    assert torch.equal(memory.tensor, values)
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_a_part_of_it_keeps_it_alive(tmp_path: Path) -> None:
    part = FileBackedBuffer(tmp_path, 1000, torch.float32).tensor.fill_(3.0)[10:20]
    gc.collect()
    assert part.sum() == 30


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    before = _open_files()
    for _ in range(50):
        FileBackedBuffer(tmp_path, 1 << 20, torch.float32).tensor.add_(1)
    gc.collect()
    assert _open_files() <= before + 1


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_of_nothing(tmp_path: Path) -> None:
    assert FileBackedBuffer(tmp_path, 0, torch.float32).tensor.shape == (0,)


def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Found .*nowhere"):
        FileBackedBuffer(tmp_path / "nowhere", 10, torch.float32)
