"""What cannot work with a file of tensors, and what its disk does wrong, is an error that leaves no file behind."""

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from tensor_files import SPAN, WAYS, aligned, noise

from colossal._src.offload import DirectIO, TensorFile
from colossal._src.offload.scratch_file import ScratchFile
from colossal.errors import CheckpointError, ConfigError, ShapeError, UnsupportedError

pytestmark = pytest.mark.slow


def test_arguments_that_cannot_work(disk) -> None:
    with pytest.raises(ConfigError, match="Found engine 'libaio'"):
        TensorFile(disk, [4], engine="libaio")
    with pytest.raises(ConfigError, match="sizes from -1"):
        TensorFile(disk, [-1])


def test_a_missing_directory(engine, disk) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        TensorFile(disk / "missing", [4], engine)


def test_a_directory_that_may_not_be_written_to(disk, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match="Read-only file system"):
        ScratchFile(disk, 4)


def test_a_full_disk_is_found_at_the_start(disk) -> None:
    # more than any disk has, so that none of it is filled: what others write there at the same time must fit
    with pytest.raises(ConfigError, match=r"[Nn]o space left|too large"):
        TensorFile(disk, [1 << 60], direct=DirectIO(read=True, write=True))


def test_a_full_disk_at_the_start_leaves_nothing_open(disk, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match="No space left"):
        TensorFile(disk, [1 << 20])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_system_that_cannot_reserve_room(engine, disk, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with TensorFile(disk, [40], engine) as file:
        back = torch.ones(10)
        file.read(0, back).wait()
        assert not back.any()


@pytest.mark.parametrize("direct", WAYS[:2])
def test_a_file_that_was_cut_off(engine, direct, disk) -> None:
    size = 2 * SPAN
    with TensorFile(disk, [size], engine, direct) as file:
        os.ftruncate(file._flights.file.buffered, SPAN + 4096)
        request = file.read(0, aligned(size))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="must be read in full.*the file ends too early"):
                request.wait()


@pytest.mark.parametrize("direct", WAYS[:2])
def test_a_write_that_fails_leaves_the_tensor_as_it_is(engine, direct, disk) -> None:
    """Beyond the largest size that the process may give a file, the system refuses to write."""
    size = 4 * SPAN
    source = aligned(size).copy_(noise(size))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TensorFile(disk, [size], engine, direct) as file:
        os.ftruncate(file._flights.file.buffered, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SPAN, before[1]))
        try:
            request = file.write(0, source)
            with pytest.raises(CheckpointError, match="must be written in full.*File too large") as caught:
                request.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert torch.equal(source, noise(size))


def test_a_device_that_is_full(engine, disk) -> None:
    with TensorFile(disk, [SPAN], engine) as file:
        full = os.open("/dev/full", os.O_RDWR)
        own, file._flights.file.buffered = file._flights.file.buffered, full
        with pytest.raises(CheckpointError, match="No space left on device"):
            file.write(0, torch.zeros(SPAN, dtype=torch.uint8)).wait()
        file._flights.file.buffered = own
        os.close(full)


def test_closing_tells_of_an_error_that_nobody_waited_for(engine, disk) -> None:
    file = TensorFile(disk, [SPAN], engine)
    os.ftruncate(file._flights.file.buffered, 0)
    file.read(0, torch.zeros(SPAN, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="ends too early"):
        file.close()
    file.close()
    assert file._flights.file.buffered == -1


def test_an_error_that_was_told_is_not_told_again(engine, disk) -> None:
    with TensorFile(disk, [SPAN], engine) as file:
        os.ftruncate(file._flights.file.buffered, 0)
        with pytest.raises(CheckpointError):
            file.read(0, torch.zeros(SPAN, dtype=torch.uint8)).wait()


def test_an_exception_of_the_block_goes_first(disk) -> None:
    def spoil() -> None:
        with TensorFile(disk, [SPAN]) as file:
            os.ftruncate(file._flights.file.buffered, 0)
            file.read(0, torch.zeros(SPAN, dtype=torch.uint8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spoil()


def test_tensors_that_do_not_fit(disk) -> None:
    with TensorFile(disk, [16]) as file:
        with pytest.raises(ShapeError, match="at most 16 bytes. Found 20 bytes"):
            file.write(0, torch.zeros(5))
        with pytest.raises(ShapeError, match="not contiguous"):
            file.read(0, torch.zeros(2, 2).t())
        with pytest.raises(ShapeError, match="on meta"):
            file.read(0, torch.zeros(2, device="meta"))
        with pytest.raises(IndexError):
            file.read(1, torch.zeros(2))


def test_a_closed_file_is_not_used(disk) -> None:
    file = TensorFile(disk, [16])
    request = file.write(0, torch.ones(4))
    file.close()
    request.wait()
    with pytest.raises(UnsupportedError, match="it was closed"):
        file.read(0, torch.ones(4))
