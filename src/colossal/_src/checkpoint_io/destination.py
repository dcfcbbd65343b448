"""Where a checkpoint goes: one file, or shards with an index; the old one stays until the new one is complete."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from colossal._src.checkpoint_io.index_and_names import CheckpointIndexFile, FileNames, digest_of_file
from colossal._src.checkpoint_io.staging import Staging, prepare_directory, prepare_file, sync
from colossal.errors import CheckpointError

if TYPE_CHECKING:
    from colossal._src.checkpoint_io.adapter_files import AdapterFiles

# [Note: one rename]
# A directory of shards becomes the new checkpoint by the rename of its index, and by nothing else. The shards that the
# index names must therefore not overwrite those that the old index names: where a name is taken, the new shard gets the
# name with a revision. A process that is killed before the rename leaves the old checkpoint and files that no index
# names; one that is killed after it, the new checkpoint and files that no index names any more. The next save removes
# either.


class Destination(ABC):
    """The files of one save, on the rank that puts them in place."""

    @abstractmethod
    def reserve(self, sizes: Sequence[int]) -> list[Path]:
        """Create the temporary files."""

    @abstractmethod
    def commit(self, names: Sequence[Sequence[Any]], total_size: int, save_id: str) -> None:
        """Put the files in place, once they are written."""

    @abstractmethod
    def close(self) -> None:
        """Delete what is not in place."""


@final
class SingleFileDestination(Destination):
    """A checkpoint of one file."""

    def __init__(self, path: Path) -> None:
        self._path, self._staging = path, Staging()

    def reserve(self, sizes: Sequence[int]) -> list[Path]:
        """Create the temporary file."""
        (size,) = sizes
        return [self._staging.reserve(prepare_file(self._path), size)]

    def commit(self, names: Sequence[Sequence[Any]], total_size: int, save_id: str) -> None:  # noqa: ARG002
        """Put the file in place."""
        self._staging.commit()

    def close(self) -> None:
        """Delete the file if it is not in place."""
        self._staging.__exit__()


@final
class ShardedDestination(Destination):
    """A checkpoint of several files and an index, in the format of Hugging Face."""

    def __init__(
        self,
        directory: Path,
        names: FileNames,
        rivals: Sequence[FileNames],
        extras: Mapping[str, Callable[[Path], object]] | None = None,
        groups: bool = False,
        adapters: "AdapterFiles | None" = None,
    ) -> None:
        self._directory, self._names, self._rivals, self._adapters = directory, names, rivals, adapters
        self._extras, self._groups, self._staging = extras or {}, groups, Staging()
        self._targets: list[Path] = []

    def reserve(self, sizes: Sequence[int]) -> list[Path]:
        """Create the temporary files."""
        prepare_directory(self._directory)
        for stale in self._directory.glob(".*.tmp"):
            if any(names.owns(stale.name[1:].rsplit(".", 2)[0]) for names in self._rivals):
                stale.unlink()
        num_named = len(sizes) - (self._adapters is not None)
        self._targets = [self._directory / name for name in self._file_names(num_named)]
        files = [self._staging.reserve(target, size) for target, size in zip(self._targets, sizes, strict=False)]
        return files if self._adapters is None else [*files, self._adapters.reserve(self._staging, sizes[-1])]

    def commit(self, names: Sequence[Sequence[Any]], total_size: int, save_id: str) -> None:
        """Put the shards in place, then the index, then delete what the old one named."""
        final_names = self._free_names()
        index = CheckpointIndexFile(self._directory)
        index.metadata["total_size"] = total_size
        index.metadata.update({"save": save_id} if save_id else {})
        index.metadata.update({"param_groups": final_names[-1]} if self._groups else {})
        if replaced := self._foreign_indices():
            index.metadata["replaces"] = replaced
        for target, name, keys in zip(self._targets, final_names, names, strict=False):
            self._staging.move(target, name)
            for key in keys:
                index.append_weight_map(key, name)
        for name, write in self._extras.items():
            self._staging.add(self._directory / name, write)
        # now, as the index that names them is about to be replaced
        outdated = self._adapters_of_indices()
        if self._adapters is not None:
            self._adapters.stage(self._staging)
            index.metadata["adapters"] = self._adapters.places
        # after everything that it names, see [Note: one rename]
        self._staging.add(self._directory / self._names.index, index.write)
        if self._adapters is not None:
            self._adapters.stage_config(self._staging)
        self._staging.commit()
        if self._adapters is not None:
            self._adapters.publish()
            outdated -= {self._adapters.weights.parent}
        self._clear({*final_names, self._names.index}, outdated)

    def close(self) -> None:
        """Delete the files that are not in place."""
        self._staging.__exit__()

    def _file_names(self, count: int, revision: int = 0) -> list[str]:
        shards = count - self._groups
        names = [self._names.shard(number, shards, revision) for number in range(1, shards + 1)]
        return [*names, self._names.groups(revision)] if self._groups else names

    def _free_names(self) -> list[str]:
        """Return the names of the first revision of which no file is there."""
        there = {entry.name for entry in self._directory.iterdir()}
        revision = 0
        while there.intersection(names := self._file_names(len(self._targets), revision)):
            revision += 1
        return names

    def _foreign_indices(self) -> dict[str, str]:
        """Return the digests of the indices that the new one replaces under other names: those of another format."""
        indices = [names.index for names in self._rivals if names.index != self._names.index]
        there = [name for name in indices if (self._directory / name).exists()]
        return {name: digest_of_file(self._directory / name) for name in there}

    def _adapters_of_indices(self) -> set[Path]:
        """Return the folders with adapters of the checkpoints that the new one replaces."""
        folders: set[Path] = set()
        for path in {self._directory / names.index for names in self._rivals}:
            with suppress(CheckpointError):  # no index, or a damaged one, names no folder
                folders |= {place.parent for place in CheckpointIndexFile.from_file(path).adapter_files}
        return folders

    def _clear(self, new: set[str], adapters: set[Path]) -> None:
        for folder in adapters:
            from colossal._src.checkpoint_io.adapter_files import remove_adapters

            remove_adapters(folder)
        for entry in list(self._directory.iterdir()):
            if entry.name not in new and any(names.owns(entry.name) for names in self._rivals):
                entry.unlink()
        sync(self._directory)
