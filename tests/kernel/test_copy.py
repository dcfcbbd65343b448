import ctypes
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal._src import _native as native
from colossal._src.kernel import memory, stream_copy
from colossal.errors import UnsupportedError

ROOM = 70_000

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler, and there is none here")


@settings(max_examples=200, deadline=None)
@given(
    length=st.one_of(st.integers(0, 300), st.integers(0, 50_000)),
    source_at=st.integers(0, 130),
    target_at=st.integers(0, 130),
)
def test_copies_these_bytes_and_no_others(length: int, source_at: int, target_at: int) -> None:
    source = torch.randint(1, 255, (ROOM,), dtype=torch.uint8)
    target = torch.zeros(ROOM, dtype=torch.uint8)
    stream_copy(target.data_ptr() + target_at, source.data_ptr() + source_at, length)
    assert torch.equal(target[target_at : target_at + length], source[source_at : source_at + length])
    assert not target[:target_at].any()
    assert not target[target_at + length :].any()


@needs_compiler
def test_is_the_built_one_here() -> None:
    assert memory._implementation() is not ctypes.memmove


@needs_compiler
def test_is_an_ordinary_copy_where_nothing_can_be_built(monkeypatch) -> None:
    def refuse(_: str) -> ctypes.CDLL:
        raise UnsupportedError("no compiler")

    monkeypatch.setattr(memory, "library", refuse)
    memory._implementation.cache_clear()
    try:
        source, target = torch.arange(1000), torch.zeros(1000, dtype=torch.long)
        stream_copy(target.data_ptr(), source.data_ptr(), source.nbytes)
        assert torch.equal(source, target)
        assert memory._implementation() is ctypes.memmove
    finally:
        memory._implementation.cache_clear()
    assert native.library("cpu/copy")
