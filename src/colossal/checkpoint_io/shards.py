"""A checkpoint cut into files: how it is planned, written, and read one file after another."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from colossal.checkpoint_io.index_file import CheckpointIndexFile
from colossal.checkpoint_io.naming import FileNames, find_checkpoint, listing
from colossal.checkpoint_io.staging import Staging
from colossal.checkpoint_io.tensor_file import read_tensor_file
from colossal.errors import CheckpointError, ConfigError

MIB = 1024**2


@final
@dataclass(frozen=True)
class Unit:
    """What must lie in one file together: one entry of the state, or several that share their memory.

    Args:
        content: The entries by name.
        num_bytes: Size of their tensors, shared memory counted once.
    """

    content: dict[Any, Any]
    num_bytes: int


def merge(units: Iterable[Unit]) -> dict[Any, Any]:
    """Return the content of all units in one dict."""
    return {name: value for unit in units for name, value in unit.content.items()}


def plan_shards(units: Iterable[Unit], max_bytes: float) -> list[dict[Any, Any]]:
    """Fill one shard after the other, in order; a unit that is larger than a shard gets one of its own.

    Args:
        units: The state.
        max_bytes: Largest size of a shard.

    Returns:
        The content of each shard; at least one, which may be empty.

    Raises:
        ConfigError: `max_bytes` is not positive.
    """
    if max_bytes <= 0:
        raise ConfigError(
            f"The size of a shard must be positive. Found size_per_shard={max_bytes / MIB:g} MB. The default is 1024."
        )
    shards: list[dict[Any, Any]] = [{}]
    filled = 0
    for unit in units:
        if shards[-1] and filled + unit.num_bytes > max_bytes:
            shards.append({})
            filled = 0
        shards[-1].update(unit.content)
        filled += unit.num_bytes
    return shards


@final
@dataclass(frozen=True)
class ShardWriter:
    """Writes the shards of one checkpoint, then its index, and clears away what an earlier one left.

    Args:
        directory: Where the files go; it exists.
        names: How they are called.
        dump: Writes the content of one shard to a path.
        rivals: Names of the checkpoints that this one replaces, its own included.
    """

    directory: Path
    names: FileNames
    dump: Callable[[Path, dict[Any, Any]], None]
    rivals: Sequence[FileNames]

    def write(
        self,
        shards: Sequence[dict[Any, Any]],
        metadata: Mapping[str, Any],
        extras: Mapping[str, Callable[[Path], object]],
    ) -> None:
        """Write everything under temporary names, then move it into place, the index last.

        Args:
            shards: The content of each shard.
            metadata: The metadata of the index.
            extras: By file name, what writes each further file of the directory.

        Raises:
            CheckpointError: A file cannot be written; the earlier checkpoint is whole then.
        """
        index = CheckpointIndexFile(self.directory)
        index.metadata.update(metadata)
        with Staging() as staging:
            for number, content in enumerate(shards, 1):
                name = self.names.shard(number, len(shards))
                staging.add(self.directory / name, lambda path, content=content: self.dump(path, content))
                for key in content:
                    index.append_weight_map(key, name)
            for name, write in extras.items():
                staging.add(self.directory / name, write)
            staging.add(self.directory / self.names.index, index.write)
            self._retire_index(staging)
            staging.commit()
        self._clear({self.names.shard(number, len(shards)) for number in range(1, len(shards) + 1)})

    def _retire_index(self, staging: Staging) -> None:
        """Delete the old index if it would name a mixture of old and new files once the move were interrupted."""
        new = {target.name for target in staging.targets if target.exists()} - {self.names.index}
        if self.names.groups in new or any(map(self.names.owns, new)):
            (self.directory / self.names.index).unlink(missing_ok=True)

    def _clear(self, shards: set[str]) -> None:
        """Delete the files of earlier checkpoints with the same prefix."""
        new = {*shards, self.names.index}
        for entry in list(self.directory.iterdir()):
            if entry.name not in new and any(names.owns(entry.name) for names in self.rivals):
                entry.unlink()


@final
@dataclass
class ShardReader:
    """Reads the files of one checkpoint, one after another.

    Args:
        files: Path of each file, and the names that it must hold according to the index.
        index: The index; None for a single file.
        low_cpu_mem_mode: Map the files, or read `num_threads` of them at a time; otherwise keep all of them in memory.
        num_threads: Number of files that are read at once.
    """

    files: dict[Path, set[str]]
    index: CheckpointIndexFile | None
    low_cpu_mem_mode: bool
    num_threads: int
    _kept: dict[Path, Any] = field(default_factory=dict)

    def contents(self, *, ahead: bool = False) -> Iterator[tuple[Path, dict[Any, Any]]]:
        """Yield the path and the content of each file.

        Args:
            ahead: Only names and shapes are looked at, so that mapping the files is enough.

        Raises:
            CheckpointError: A file is missing or damaged, or lacks a name that the index promises.
        """
        if self.low_cpu_mem_mode and (ahead or self.num_threads == 1):
            for path in self.files:
                yield path, self._checked(path, read_tensor_file(path, mmap=True))
            return
        with ThreadPoolExecutor(self.num_threads) as pool:
            paths = list(self.files)
            for start in range(0, len(paths), self.num_threads):
                batch = paths[start : start + self.num_threads]
                yield from zip(batch, list(pool.map(self._read, batch)), strict=True)

    def _read(self, path: Path) -> dict[Any, Any]:
        if path in self._kept:
            return self._kept[path]
        content = self._checked(path, read_tensor_file(path, mmap=False))
        if not self.low_cpu_mem_mode:
            self._kept[path] = content
        return content

    def _checked(self, path: Path, content: dict[Any, Any]) -> dict[Any, Any]:
        """Return the content if it holds all names of the index."""
        if missing := self.files[path] - {str(key) for key in content}:
            raise CheckpointError(
                f"A shard must hold what its index promises. Found {path} without {listing(sorted(missing))}. "
                "The index and the shards come from different saves: copy the whole directory again."
            )
        return content


def open_checkpoint(
    path: Path, kinds: Sequence[FileNames], low_cpu_mem_mode: bool = True, num_threads: int = 1
) -> ShardReader:
    """Find the files of a checkpoint, and its index if it has one.

    Args:
        path: A file, an index, or a directory that holds one of them.
        kinds: What the names in a directory may look like.
        low_cpu_mem_mode: Do not keep the content of more than `num_threads` files in memory.
        num_threads: Number of files that are read at once.

    Raises:
        CheckpointError: There is no checkpoint, or several, or the index is damaged.
        ConfigError: `num_threads` is less than 1.
    """
    if num_threads < 1:
        raise ConfigError(f"Reading needs at least one thread. Found num_threads={num_threads}. The default is 1.")
    found = find_checkpoint(path, kinds)
    if found.suffix != ".json":
        return ShardReader({found: set()}, None, low_cpu_mem_mode, num_threads)
    index = CheckpointIndexFile.from_file(found)
    files: dict[Path, set[str]] = {}
    for name in index.get_all_param_names():
        files.setdefault(Path(index.get_checkpoint_file(name)), set()).add(name)
    return ShardReader(files, index, low_cpu_mem_mode, num_threads)
