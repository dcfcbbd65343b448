"""Atomic file writes: a file is complete, or does not exist."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self, final

from colossal.errors import CheckpointError, ColossalError


@final
class Staging:
    """Collects finished files under temporary names and then moves them all into place.

    Use it as a context manager: what has not been moved by the end of the block is deleted.
    """

    def __init__(self) -> None:
        self._moves: dict[Path, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for temporary in self._moves.values():
            temporary.unlink(missing_ok=True)

    @property
    def targets(self) -> list[Path]:
        """Final paths of the files that wait."""
        return list(self._moves)

    def reserve(self, target: Path, num_bytes: int) -> Path:
        """Create the file that is to become `target`, in the same directory, and take its room on the disk.

        Temporary files of the same target, which a process that was killed left, are deleted. Another process that
        saves there now keeps its own: what is renamed last stays.
        """
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            for stale in target.parent.glob(f".{_escape(target.name)}.*.tmp"):
                if not _is_written(stale):
                    stale.unlink(missing_ok=True)
            self._moves[target] = temporary
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                _allocate(descriptor, num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise cannot_write(target, error) from error
        return temporary

    def add(self, target: Path, write: Callable[[Path], object]) -> None:
        """Write the file that is to become `target`, and flush it to the disk."""
        temporary = self.reserve(target, 0)
        try:
            mode = temporary.stat().st_mode
            write(temporary)
            temporary.chmod(mode)  # a writer may have made it readable by its owner only
            # before the rename: after a crash the file might else have its name and not its content
            sync(temporary)
        except ColossalError:
            raise
        except Exception as error:
            raise cannot_write(target, error) from error

    def commit(self) -> None:
        """Move every file to its final path, in the order in which they were added."""
        for target in self.targets:
            try:
                self._moves[target].replace(target)
            except OSError as error:
                raise CheckpointError(
                    f"Saving a checkpoint must put {target} into place. Found {type(error).__name__}: {error}. "
                    "Remove what stands at that path, or choose another one."
                ) from error
            del self._moves[target]
            # a rename is on the disk when its directory is; one after the other, so that their order survives a crash
            sync(target.parent)

    def move(self, target: Path, name: str) -> None:
        """Give a file that waits another final name in the same directory, and put it at the end of the order."""
        self._moves[target.with_name(name)] = self._moves.pop(target)


def prepare_file(path: Path) -> Path:
    """Return `path` once a file can be written there; its parent directories are created."""
    if path.is_dir():
        raise CheckpointError(
            f"Saving to one file needs the path of a file. Found the directory {path}. "
            "Add a file name to the path, or pass shard=True to save into the directory."
        )
    _create(path.parent)
    return path


def prepare_directory(path: Path) -> Path:
    """Return `path` once it is a directory; it and its parents are created."""
    if path.is_file():
        raise CheckpointError(
            f"Saving with shard=True needs the path of a directory. Found the file {path}. "
            "Choose another path, or pass shard=False to save to one file."
        )
    _create(path)
    return path


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"Saving a checkpoint needs the directory {directory}. Found that it cannot be created: {error}. "
            "Choose a path whose parents are directories that you may write to."
        ) from error


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Take the room of a file on the disk, so that a full disk is known before anything is written."""
    if not num_bytes:
        return
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, num_bytes)  # a file system that cannot reserve: it is full when it is full


def _escape(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _is_written(temporary: Path) -> bool:
    """Whether another process of this host that still runs has the number in the name of a temporary file."""
    number = temporary.name.split(".")[-2]
    if not number.isdecimal() or int(number) == os.getpid():
        return False
    try:
        os.kill(int(number), 0)  # sends nothing
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def cannot_write(target: Path, error: Exception) -> CheckpointError:
    """Return the error of a file that cannot be written."""
    return CheckpointError(
        f"Saving a checkpoint must write {target}. Found {type(error).__name__}: {error}. "
        "Check the free space and the permissions of the directory, and that the state holds plain data."
    )
