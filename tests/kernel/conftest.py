"""An engine of transfers to disks, each in turn, and a directory for their files."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensor_files import engines


@pytest.fixture(params=engines())
def engine(request) -> str:
    return request.param


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A directory that is empty in the end."""
    yield tmp_path
    if list(tmp_path.iterdir()):
        gc.collect()  # a file that nobody holds any more may still wait for this
    assert not list(tmp_path.iterdir())
