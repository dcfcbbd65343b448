"""The files of a checkpoint as a source of tensors: which there are, and a part of any of them."""

import copy
import hashlib
import os
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeVar, cast, final

import torch

from colossal._src.checkpoint_io.content import insert_tensors
from colossal._src.checkpoint_io.index_and_names import CheckpointIndexFile, FileNames, find_checkpoint, listing
from colossal._src.checkpoint_io.safetensors_file import SafeFile
from colossal._src.tensor import Region
from colossal.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(function: Callable[[T], R], items: Sequence[T], num_threads: int) -> list[R]:
    """Apply a function to each item.

    Threads of its own rather than an executor's, which refuses work once the program has begun to end: that is when the
    last asynchronous save is written.
    """
    results: list[R | None] = [None] * len(items)
    errors: list[Exception] = []
    numbers = iter(range(len(items)))  # the next of an iterator of a range is one step of the interpreter

    def work() -> None:
        for number in numbers:
            if errors:
                return
            try:
                results[number] = function(items[number])
            except Exception as error:  # noqa: BLE001 - raised by the calling thread
                errors.append(error)

    helpers = [threading.Thread(target=work) for _ in range(min(num_threads, len(items)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


def compact(content: dict[Any, Any]) -> dict[Any, Any]:
    """Return the content with a copy of each tensor that is part of larger memory, which would be saved with it."""
    views = {id(value): value.clone() for value in content.values() if _is_part(value)}
    if not views:
        return content
    compacted = copy.copy(content)
    compacted.update((name, views[id(value)]) for name, value in content.items() if id(value) in views)
    return compacted


def write_torch(path: Path, content: dict[Any, Any]) -> None:
    """Write `content` in PyTorch's format and make sure that it can be read without executing pickle."""
    output = _Output(path)
    try:
        with output:
            torch.save(compact(content), cast("IO[bytes]", output))
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        if output.error is not None:
            raise output.error from error
        raise CheckpointError(
            "A checkpoint can hold tensors and plain data: numbers, strings, lists and dicts of them. Found state that "
            f"could not be written and read back: {_first_line(error)}. Keep functions and objects out of the state."
        ) from error


@final
class _Output:
    """A file that remembers why it could not be written, which `torch.save` does not report."""

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        # a file that is there has room reserved on the disk, which "wb" would give back
        self._file = path.open("r+b" if path.exists() else "wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._file.truncate()  # what was reserved and not needed
        finally:
            self._file.close()

    def write(self, content: Any) -> int:
        """Write bytes."""
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Hand what was written over to the system."""
        self._file.flush()


def read_torch(path: Path, *, mmap: bool, verify: bool = True, list_name: str | None = None) -> dict[Any, Any]:
    """Read a file to the CPU, without executing pickle."""
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    try:
        if is_zip and verify:
            _verify(path)
        if path.suffix == ".safetensors":  # torch would go by this name, and the file is one of its own all the same
            with path.open("rb") as file:
                content = torch.load(file, map_location="cpu", weights_only=True)
        else:  # the format before PyTorch 1.6 is no archive, and cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)
    except CheckpointError:
        raise
    except Exception as error:
        advice = "Check that the copy is complete, and that it was saved by PyTorch or safetensors."
        if "Unsupported global" in str(error):  # an object, such as a module or an array of NumPy
            advice = "Loading runs no code of a file. Save the tensors alone, by torch.save(model.state_dict(), path)."
        raise CheckpointError(
            f"Loading needs a readable file of tensors. Found {path}, which cannot be read: "
            f"{_first_line(error)}. {advice}"
        ) from error
    if isinstance(content, list) and list_name is not None:
        return {list_name: content}
    if not isinstance(content, dict):
        raise CheckpointError(
            f"A file of a checkpoint must hold a dict. Found a {type(content).__name__} in {path}. "
            "Check that the path is that of a checkpoint."
        )
    return content


def _verify(path: Path) -> None:
    """Raise if an entry of the archive does not fit its checksum."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        wrong = archive.testzip()
    if wrong is None and len(set(names)) == len(names):
        return
    raise CheckpointError(
        f"Loading needs a file as it was written. Found {path} damaged: its entry {wrong or 'names'!r}, one of the "
        "tensors, does not fit its checksum. Copy it again from where it came, or load an earlier checkpoint."
    )


def _is_part(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes


def _first_line(error: Exception) -> str:
    """Return what went wrong, without torch's advice to trust the file."""
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0].partition('. Please use')[0]}"


_HEAD_BYTES = 9  # enough to distinguish the formats
_NUM_SAMPLES, _SAMPLE_BYTES = 4, 4096


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

    def __init__(
        self,
        files: Mapping[Path, set[str]],
        index: CheckpointIndexFile | None,
        mmap: bool = True,
        member: str | None = None,
    ) -> None:
        self.items: dict[Any, Item] = {}
        self.files: dict[Path, list[Any]] = {}
        self.plain: Any = None
        self.index = index
        self._mmap, self._member = mmap, member
        self._stack = ExitStack()
        try:
            for path, promised in files.items():
                self._add(path, promised)
        except BaseException:
            self._stack.close()
            raise

    @classmethod
    def find(cls, path: Path, kinds: Sequence[FileNames], mmap: bool = True, member: str | None = None) -> Self:
        """Open the files that a path stands for, or one entry of a file that holds several states."""
        found = find_checkpoint(path, kinds)
        if found.suffix != ".json":
            return cls({found: set()}, None, mmap, member)
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

    def sample(self) -> str:
        """Digest the sizes of all files and some of their bytes: other files differ in these almost surely."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{path.name} {size}".encode())
                for place in range(_NUM_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * place // (_NUM_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()

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
            if self._member is not None:
                content = _entry_of(content, self._member, path)
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


def _entry_of(content: Mapping[Any, Any], member: str, path: Path) -> dict[Any, Any]:
    entry = content.get(member)
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"Loading needs a file with a dict under the name {member!r}. Found {path} with "
            f"{listing(map(str, content)) or 'nothing'}, {member!r} being a {type(entry).__name__}. Check the path, or "
            "load a file that holds the state itself without a member."
        )
    return entry


def _reader(file: SafeFile, name: str) -> Callable[[Region, torch.Tensor], None]:
    return lambda region, out: file.read(name, region, out)


def in_memory(value: Any) -> Item:
    """Describe a value that has been read already."""
    if not isinstance(value, torch.Tensor):
        return Item(None, None, _no_tensor, value)
    return Item(value.shape, value.dtype, lambda region, out: out.copy_(value[region.slices]), value)


def _no_tensor(_region: Region, _out: torch.Tensor) -> None:
    raise AssertionError("only tensors have regions")


def read_plain(source: Source) -> Any:
    """Return numbers, strings and tensors as they were nested; those of PyTorch's format by their names."""
    if source.plain is not None:
        return insert_tensors(source.plain, lambda name: source.item(name).read_full())
    return {name: item.value if item.shape is None else item.read_full() for name, item in source.items.items()}
