"""Files that appear whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self, final

from colossal.errors import CheckpointError, ColossalError


@final
class Staging:
    """Collects finished files under temporary names and then moves them all into place.

    Use it as a context manager: what has not been moved by the end of the block is deleted.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> target = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with Staging() as staging:
        ...     staging.add(target, lambda path: path.write_text("whole"))
        ...     target.exists()
        ...     staging.commit()
        False
        >>> target.read_text()
        'whole'
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

    def add(self, target: Path, write: Callable[[Path], object]) -> None:
        """Write the file that is to become `target`, in the same directory, and flush it to the disk.

        Args:
            target: Final path of the file.
            write: Writes a file at the path that it is given.

        Raises:
            CheckpointError: The file could not be written; or what else of ours `write` raised.
        """
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        self._moves[target] = temporary
        try:
            temporary.touch()
            mode = temporary.stat().st_mode  # safetensors lets only the owner read; a checkpoint is a file like others
            write(temporary)
            temporary.chmod(mode)
            _sync(temporary)
        except ColossalError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"Saving a checkpoint must write {target}. Found {type(error).__name__}: {error}. "
                "Check the free space and the permissions of the directory, and that the state holds plain data."
            ) from error

    def commit(self) -> None:
        """Move every file to its final path, in the order in which they were added.

        Raises:
            CheckpointError: A file could not be moved.
        """
        for target in self.targets:
            try:
                self._moves[target].replace(target)
            except OSError as error:
                raise CheckpointError(
                    f"Saving a checkpoint must put {target} into place. Found {type(error).__name__}: {error}. "
                    "Remove what stands at that path, or choose another one."
                ) from error
            del self._moves[target]
            _sync(target.parent)


def prepare_file(path: Path) -> Path:
    """Return `path` once a file can be written there; its parent directories are created.

    Raises:
        CheckpointError: The path is a directory, or its parent cannot be created.
    """
    if path.is_dir():
        raise CheckpointError(
            f"Saving to one file needs the path of a file. Found the directory {path}. "
            "Add a file name to the path, or pass shard=True to save into the directory."
        )
    _create(path.parent)
    return path


def prepare_directory(path: Path) -> Path:
    """Return `path` once it is a directory; it and its parents are created.

    Raises:
        CheckpointError: The path is a file, or the directory cannot be created.
    """
    if path.is_file():
        raise CheckpointError(
            f"Saving with shard=True needs the path of a directory. Found the file {path}. "
            "Choose another path, or pass shard=False to save to one file."
        )
    _create(path)
    return path


def _create(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"Saving a checkpoint needs the directory {directory}. Found that it cannot be created: {error}. "
            "Choose a path whose parents are directories that you may write to."
        ) from error


def _sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
