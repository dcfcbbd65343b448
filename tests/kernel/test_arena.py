"""Memory in huge pages: packed, aligned, zero, and given back with the last tensor that lies in it."""

import copy
import io
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import colossal
from colossal._src.kernel import memory
from colossal.kernel import huge_zeros

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_tensors_are_packed_aligned_and_zero(dtype) -> None:
    shapes = [(3, 5), (), (0, 7), (1000,), (64,)]
    tensors = huge_zeros(shapes, dtype)
    assert [tuple(one.shape) for one in tensors] == shapes
    at = tensors[0].data_ptr()
    assert at % (2 * MIB) == 0
    for one in tensors:
        assert one.dtype == dtype
        assert one.is_contiguous()
        assert not one.any()
        if one.numel():
            assert one.data_ptr() == at
            at += -(-one.nbytes // 64) * 64


def test_each_tensor_is_its_own() -> None:
    """Writing one changes no other, and whoever saves or copies one gets only that."""
    first, second = huge_zeros([(100,), (50,)])
    first.fill_(1)
    second.fill_(2)
    assert first.sum() == 100
    file = io.BytesIO()
    torch.save(second, file)
    assert file.tell() < 3000
    assert copy.deepcopy(second).untyped_storage().nbytes() == 200


def test_nothing_is_nothing() -> None:
    assert huge_zeros([]) == []
    (empty,) = huge_zeros([(0, 3)], torch.float16)
    assert empty.shape == (0, 3)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc of Linux")
def test_memory_is_taken_when_it_is_written_to_and_given_back_with_the_last_tensor() -> None:
    before = resident_bytes()
    first, second = huge_zeros([(64 * MIB,), (64 * MIB,)], torch.uint8)
    assert resident_bytes() - before < 16 * MIB
    second.fill_(1)
    assert 60 * MIB < resident_bytes() - before < 80 * MIB
    first.fill_(1)
    del second
    assert resident_bytes() - before > 120 * MIB
    del first
    assert resident_bytes() - before < 16 * MIB


def advice_of(tensor: torch.Tensor) -> list[str]:
    """The flags of the mapping that a tensor lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= tensor.data_ptr() < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    not (hasattr(mmap, "MADV_HUGEPAGE") and os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled")),  # noqa: PTH110
    reason="needs a kernel with huge pages",
)
def test_the_kernel_is_advised_to_use_huge_pages() -> None:
    (tensor,) = huge_zeros([(MIB,)])
    assert "hg" in advice_of(tensor)
    assert "hg" not in advice_of(torch.frombuffer(mmap.mmap(-1, 4 * MIB), dtype=torch.float32))


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch) -> None:
    class Pages(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Pages)
    (tensor,) = huge_zeros([(1000,)])
    assert tensor.add_(1).sum() == 1000


IN_HUGE_PAGES = """
import os, re, sys
import torch
import colossal
tensor = torch.ones(4 << 20)
at, found = tensor.data_ptr(), None
for line in open("/proc/self/smaps"):
    if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
        found = int(span[1], 16) <= at + (1 << 21) < int(span[2], 16)
    elif line.startswith("VmFlags:") and found:
        print("hg" in line.split(), os.environ["THP_MEM_ALLOC_ENABLE"])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc of Linux")
@pytest.mark.parametrize("chosen", [None, "0"])
def test_importing_the_library_asks_torch_for_huge_pages_unless_the_user_chose(chosen: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environment |= {"PYTHONPATH": str(Path(colossal.__file__).parents[1])}
    if chosen is not None:
        environment["THP_MEM_ALLOC_ENABLE"] = chosen
    done = subprocess.run(
        [sys.executable, "-c", IN_HUGE_PAGES], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == (["True", "1"] if chosen is None else ["False", "0"])
