"""Whether a disk is faster through the page cache of the system or past it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from colossal._src.kernel import huge_zeros
from colossal._src.offload.io_engine import FileTransfer, IOEngine
from colossal._src.offload.scratch_file import ScratchFile
from colossal.errors import ConfigError

_BYTES = 32 << 20
_SECONDS = 0.5
_ROUNDS = 3
_GAIN = 1.1  # what the page cache must gain, as it takes memory and a copy
_FOUND: dict[tuple[int, str], "DirectIO"] = {}


@final
@dataclass(frozen=True)
class DirectIO:
    """For each direction, whether it goes past the page cache.

    Args:
        read: Whether reads do.
        write: Whether writes do.

    Example:
        >>> from colossal.offload import DirectIO
        >>> DirectIO(read=False, write=True)
        DirectIO(read=False, write=True)
    """

    read: bool
    write: bool


def probe(directory: str | os.PathLike[str], engine: IOEngine) -> DirectIO:
    """Find out which way is faster, by writing and reading some megabytes both ways.

    It takes up to a second or so, more on a disk that is slow; the answer is kept for the device.
    """
    try:
        key = Path(directory).stat().st_dev, engine.name
        if key not in _FOUND:
            _FOUND[key] = _measured(ScratchFile(directory, _BYTES), engine)
    except (OSError, ConfigError):  # what is wrong shows when the file itself is made
        return DirectIO(read=True, write=True)
    return _FOUND[key]


def _measured(file: ScratchFile, engine: IOEngine) -> DirectIO:
    (buffer,) = huge_zeros([(_BYTES,)], torch.uint8)
    buffer.random_(generator=torch.Generator().manual_seed(0))  # not the one that dropout draws from
    best: dict[tuple[bool, bool], float] = {}
    started = time.perf_counter()
    try:
        for _ in range(_ROUNDS):
            for is_direct in (True, False):
                for is_write in (True, False):
                    descriptor = file.direct if is_direct else file.buffered
                    order = FileTransfer(buffer.data_ptr(), 0, _BYTES, file.buffered, descriptor, is_write)
                    key = is_direct, is_write
                    best[key] = min(_seconds(engine, order), best.get(key, float("inf")))
            if time.perf_counter() - started > _SECONDS:
                break
    finally:
        file.close()
    gains = (best[True, is_write] / best[False, is_write] for is_write in (False, True))
    return DirectIO(*(gain < _GAIN for gain in gains))


def _seconds(engine: IOEngine, transfer: FileTransfer) -> float:
    """Time a transfer between memory and the disk itself; infinite where it fails."""
    if not transfer.is_write:
        # or the bytes would come from the page cache
        os.posix_fadvise(transfer.buffered, 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    handle = engine.submit(transfer)
    status = engine.wait(handle)
    if transfer.is_write:
        # or the bytes might only have reached the page cache
        os.fdatasync(transfer.buffered)
    seconds = time.perf_counter() - started
    engine.forget(handle)
    return float("inf") if status else seconds
