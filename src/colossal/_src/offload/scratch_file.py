"""A file without a name, whose room on the disk is free again when the process ends, however it ends."""

import errno
import fcntl
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import final

import torch

from colossal.errors import ConfigError

BLOCK = 4096
"""Memory, offset and length of transfers that go past the page cache are multiples of it."""

_PREFIX = ".colossal-scratch-"
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def padded(num_bytes: int) -> int:
    """Round a number of bytes up to a multiple of the block size."""
    return -(-num_bytes // BLOCK) * BLOCK


@final
class ScratchFile:
    """A file that only the process which made it, and what it forks, can reach.

    It has no name in its directory, so no two can be the same, and nothing is left of it after a kill. Where a file
    system cannot make such a file, it gets a unique name that is removed at once; where an open file must keep its
    name, that goes when the file is closed, and what a killed process left is removed by the next `ScratchFile` there.

    Its room is reserved when it is made: a full disk shows then, and not in the middle of a training.
    """

    def __init__(self, directory: str | os.PathLike[str], num_bytes: int) -> None:
        self.directory = Path(directory)
        self.num_bytes = padded(num_bytes)
        self.buffered = self.direct = -1
        self._name: Path | None = None
        try:
            _remove_stale(self.directory)
            self._open()
            _reserve(self.buffered, self.num_bytes)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"A file for tensors needs a directory that can be written to, with {self.num_bytes:,} bytes of room. "
                f"Found {self.directory}: {error.strerror}. Make room there, or name another directory."
            ) from error

    def close(self) -> None:
        """Close the descriptors, which frees the room; nothing may be in flight."""
        descriptors = {self.buffered, self.direct} - {-1}
        if self._name is not None:
            with suppress(OSError):
                self._name.unlink()
        self.buffered, self.direct, self._name = -1, -1, None
        for descriptor in descriptors:
            os.close(descriptor)

    def _open(self) -> None:
        try:
            self.buffered = os.open(self.directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        except (OSError, AttributeError) as error:
            # the other way would fail for the same reason
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
                raise
            self._open_named()
        self.direct = self._past_the_cache()

    def _open_named(self) -> None:
        self.buffered, name = tempfile.mkstemp(prefix=_PREFIX, dir=self.directory)
        self._name = Path(name)
        with suppress(OSError):  # without locks, what is left after a kill stays
            fcntl.flock(self.buffered, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(OSError):
            self._name.unlink()
            self._name = None

    def _past_the_cache(self) -> int:
        try:
            # a second descriptor of the same file, which has no name to open it by
            return os.open(f"/proc/self/fd/{self.buffered}", os.O_RDWR | os.O_DIRECT)
        except (OSError, AttributeError):
            return self.buffered


def _reserve(descriptor: int, num_bytes: int) -> None:
    os.ftruncate(descriptor, num_bytes)
    if not num_bytes:
        return
    try:
        # a full disk shows now, not in the middle of training
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise


def _remove_stale(directory: Path) -> None:
    """Remove files that no process has open: those it can lock."""
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


@final
class FileBackedBuffer:
    """A tensor whose values are in a file without a name, read and written as if it were in memory.

    What is read stays in the cache of the operating system as long as there is room, and is read ahead from the disk
    otherwise; what is written goes there in the background. The room on the disk is reserved at once, and free again
    when the process ends.

    Source: Rajbhandari et al., "ZeRO-Infinity", 2021, https://arxiv.org/abs/2104.07857, section 5.
    """

    def __init__(self, directory: str | os.PathLike[str], numel: int, dtype: torch.dtype) -> None:
        num_bytes = max(numel, 1) * dtype.itemsize
        file = ScratchFile(directory, num_bytes)
        try:
            self._pages = mmap.mmap(file.buffered, num_bytes)
        finally:
            file.close()  # the mapping keeps the file
        self.tensor = torch.frombuffer(self._pages, dtype=dtype, count=max(numel, 1))[:numel]

    def drop_page_cache(self) -> None:
        """Take the values out of the memory of this process, until they are used again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            # the mapping is shared: what was written stays in the file
            self._pages.madvise(mmap.MADV_DONTNEED)
