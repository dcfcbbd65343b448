"""The files of a checkpoint as a source of tensors: which there are, and a part of any of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import torch

from colossal._src.checkpoint_io.blocks import SafeFile
from colossal._src.checkpoint_io.index_file import CheckpointIndexFile
from colossal._src.checkpoint_io.naming import FileNames, find_checkpoint, listing
from colossal._src.checkpoint_io.threads import map_in_threads
from colossal._src.checkpoint_io.torch_file import read_torch
from colossal._src.tensor import Region
from colossal.errors import CheckpointError

_HEAD_BYTES = 9  # enough to distinguish the formats


@final
@dataclass(frozen=True)
class Item:
    """One entry of a file."""

    shape: torch.Size | None  # the shape of the tensor; None for what is not a tensor
    dtype: torch.dtype | None  # its dtype; None for what is not a tensor
    read: Callable[[Region, torch.Tensor], object]  # fills a tensor with a region of the entry
    value: Any = None  # what is not a tensor

    def read_full(self) -> torch.Tensor:
        """Return the full tensor, on the CPU, in newly allocated memory."""
        assert self.shape is not None, "only tensors have a shape"
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(Region.full(self.shape), tensor)
        return tensor


@final
class Source:
    """The open files of one checkpoint. Use it as a context manager.

    Opening checks everything but the bytes of the tensors of safetensors files: that the files exist and are complete,
    that they hold what the index promises, and that they come from one save.
    """

    def __init__(self, files: Mapping[Path, set[str]], index: CheckpointIndexFile | None, mmap: bool = True) -> None:
        self.items: dict[Any, Item] = {}
        self.files: dict[Path, list[Any]] = {}
        self.plain: Any = None
        self.index = index
        self._mmap = mmap
        self._stack = ExitStack()
        try:
            for path, promised in files.items():
                self._add(path, promised)
        except BaseException:
            self._stack.close()
            raise

    @classmethod
    def find(cls, path: Path, kinds: Sequence[FileNames], mmap: bool = True) -> Self:
        """Open the files that a path stands for."""
        found = find_checkpoint(path, kinds)
        if found.suffix != ".json":
            return cls({found: set()}, None, mmap)
        index = CheckpointIndexFile.from_file(found)
        files: dict[Path, set[str]] = {}
        for name in index.get_all_param_names():
            files.setdefault(Path(index.get_checkpoint_file(name)), set()).add(name)
        if groups := index.get_param_group_filename():
            files.setdefault(Path(groups), set())
        if places := index.adapter_files:
            files.setdefault(next((place for place in places if place.exists()), places[-1]), set())
        return cls(files, index, mmap)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def item(self, name: str) -> Item:
        """Find a tensor that the description of the state names."""
        if name not in self.items:
            raise CheckpointError(
                f"The files of a checkpoint hold all tensors of its state. Found none with {name!r} among "
                f"{listing(map(str, self.files))}. Copy the entire directory again."
            )
        return self.items[name]

    def each_file(self, action: Callable[[dict[Any, Item]], None], num_threads: int) -> None:
        """Do something with the entries of each file."""
        parts = [{name: self.items[name] for name in names} for names in self.files.values()]
        map_in_threads(action, parts, num_threads)

    def _add(self, path: Path, promised: set[str]) -> None:
        items = self._open(path)
        if missing := promised - {str(name) for name in items}:
            raise CheckpointError(
                f"A shard must hold what its index promises. Found {path} without {listing(sorted(missing))}. "
                "The index and the shards come from different saves: copy the entire directory again."
            )
        self.items.update(items)
        self.files[path] = list(items)

    def _open(self, path: Path) -> dict[Any, Item]:
        try:
            if not path.is_file() and path.exists():  # opening a pipe would wait for somebody to write into it
                raise CheckpointError(
                    f"Loading needs a file. Found {path}, which is a directory, a pipe or a device. Check the path."
                )
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError as error:
            raise CheckpointError(
                f"Loading needs a file that can be opened. Found {path}: {error}. "
                "Check that the entire checkpoint was copied, and its permissions."
            ) from error
        if head[8:] == b"{":
            return self._open_safetensors(path)
        if head.startswith((b"PK\x03\x04", b"\x80")):
            is_groups = self.index is not None and str(path) == self.index.get_param_group_filename()
            content = read_torch(path, mmap=self._mmap, list_name="param_groups" if is_groups else None)
            return {name: in_memory(value) for name, value in content.items()}
        raise CheckpointError(
            f"Loading needs a file that PyTorch or safetensors wrote. Found {path}, which starts with {head!r}. "
            "Check the path, and that the copy of the file is complete."
        )

    def _open_safetensors(self, path: Path) -> dict[Any, Item]:
        file = self._stack.enter_context(SafeFile.open(path))
        self._check_save(path, file.header.save_id)
        self.plain = file.header.plain if self.plain is None else self.plain
        return {
            name: Item(torch.Size(place.shape), place.dtype, _reader(file, name))
            for name, place in file.header.places.items()
        }

    def _check_save(self, path: Path, save_id: str) -> None:
        expected = self.index.metadata.get("save", "") if self.index is not None else ""
        if expected and save_id != expected:
            raise CheckpointError(
                f"The files of a checkpoint must come from one save. Found {path} of save {save_id or 'unknown'!r} "
                f"with an index of save {expected!r}. Copy the entire directory again."
            )


def _reader(file: SafeFile, name: str) -> Callable[[Region, torch.Tensor], None]:
    return lambda region, out: file.read(name, region, out)


def in_memory(value: Any) -> Item:
    """Describe a value that has been read already."""
    if not isinstance(value, torch.Tensor):
        return Item(None, None, _no_tensor, value)
    return Item(value.shape, value.dtype, lambda region, out: out.copy_(value[region.slices]), value)


def _no_tensor(_region: Region, _out: torch.Tensor) -> None:
    raise AssertionError("only tensors have regions")
