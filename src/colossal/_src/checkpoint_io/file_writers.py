"""A save, carried out by all ranks together, now or in the background."""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch

from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup
from colossal._src.checkpoint_io.content import BlockWrite, Entry, assign_blocks
from colossal._src.checkpoint_io.destination import Destination
from colossal._src.checkpoint_io.index_and_names import listing
from colossal._src.checkpoint_io.safetensors_file import CODES, Header, block_digest, bytes_of, write_block
from colossal._src.checkpoint_io.source import map_in_threads, write_torch
from colossal._src.checkpoint_io.staging import cannot_write, sync
from colossal._src.kernel import huge_zeros, stream_copy
from colossal._src.tensor import Region
from colossal.errors import CheckpointError

_ALIGN = 64
_HUGE_PAGE = 1 << 21
_CHUNK_BYTES = 1 << 22
_MAX_THREADS = 4
_STAGE_BYTES = 1 << 28


@final
class Arena:
    """Host memory that is kept from one copy to the next, so that only the first one pays for getting it."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.num_bytes = -(-max(num_bytes, 1) // _HUGE_PAGE) * _HUGE_PAGE
        self.pinned = pin
        if pin:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            (memory,) = huge_zeros([(self.num_bytes,)], torch.uint8)
        self._buffer = memory.numpy()

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, one after the other, into the memory."""
        copies, at = [], 0
        for tensor in tensors:
            copies.append(self._allocate(at, tensor))
            at += _aligned(tensor.nbytes)
        on_host = [(t, c) for t, c in zip(tensors, copies, strict=True) if t.is_cpu]
        # begun first, so that the device copies while the threads of the host do
        for tensor, copy in zip(tensors, copies, strict=True):
            if not tensor.is_cpu:
                copy.copy_(tensor, non_blocking=True)
        _copy_on_host(on_host)
        if len(on_host) < len(copies):
            torch.accelerator.synchronize()
        return copies

    def _allocate(self, at: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a copy, as a separate storage: a file in PyTorch's format holds each storage entirely."""
        if not like.nbytes:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        part = torch.frombuffer(self._buffer, dtype=torch.uint8, count=like.nbytes, offset=at)
        return part.view(like.dtype).view(like.shape)


@final
class Arenas:
    """The arenas of one `CheckpointIO`: each belongs to one save at a time."""

    def __init__(self) -> None:
        self._free: list[Arena] = []
        self._lock = threading.Lock()

    def take(self, tensors: Sequence[torch.Tensor]) -> Arena:
        """Return an arena with room for copies of tensors: the smallest free one that fits, or a new one."""
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        pin = not all(tensor.is_cpu for tensor in tensors)
        with self._lock:
            fitting = [arena for arena in self._free if arena.num_bytes >= num_bytes and arena.pinned == pin]
            if fitting:
                arena = min(fitting, key=lambda each: each.num_bytes)
                self._free.remove(arena)
                return arena
        return Arena(num_bytes, pin)

    def give_back(self, arena: Arena) -> None:
        """Take an arena back, once its copies are not read any more."""
        with self._lock:
            self._free.append(arena)

    @contextmanager
    def on_host(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Lend copies in host memory of what is on a device; what is in host memory already comes as it is."""
        far = [tensor for tensor in tensors if not tensor.is_cpu]
        arena = self.take(far) if far else None
        try:
            copies = iter(arena.copy(far) if arena else ())
            yield [tensor if tensor.is_cpu else next(copies) for tensor in tensors]
        finally:
            if arena:
                self.give_back(arena)


def batches(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Split a list where copies of tensors on a device would take more host memory than a save may use."""
    begin = num_bytes = 0
    for at, tensor in enumerate(tensors):
        own = 0 if tensor.is_cpu else _aligned(tensor.nbytes)
        if num_bytes and num_bytes + own > _STAGE_BYTES:
            yield slice(begin, at)
            begin, num_bytes = at, 0
        num_bytes += own
    yield slice(begin, len(tensors))


def copy_regions_to_host(regions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous copies in host memory, each of its own; the host waits once for all of them."""
    copies = [
        torch.empty(region.shape, dtype=region.dtype, device="cpu", pin_memory=not region.is_cpu).copy_(
            region, non_blocking=True
        )
        for region in regions
    ]
    if not all(region.is_cpu for region in regions):
        torch.accelerator.synchronize()
    return copies


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _copy_on_host(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy with several threads: a single core does not use the full memory bandwidth."""
    chunks: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if not source.is_contiguous() or source.is_neg() or source.is_conj():
            target.copy_(source)
            continue
        for at in range(0, source.nbytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, source.nbytes - at)
            chunks.append((target.data_ptr() + at, source.data_ptr() + at, length))
    # the other ranks of this host copy at the same time
    threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    chunks_per_thread = max(1, -(-len(chunks) // threads))
    map_in_threads(
        _move, [chunks[at : at + chunks_per_thread] for at in range(0, len(chunks), chunks_per_thread)], threads
    )


def _move(chunks: Sequence[tuple[int, int, int]]) -> None:
    for target, source, length in chunks:
        stream_copy(target, source, length)


_THREADS = 2  # one hashes while the other one writes

Digests = list[tuple[int, str, Region, str]]


class FileWriter(ABC):
    """The content of one save."""

    def __init__(self, files: Sequence[Sequence[Entry]], save_id: str) -> None:
        self.files, self.save_id = files, save_id

    @property
    def total_size(self) -> int:
        """Size of all tensors in bytes."""
        return sum(entry.num_bytes for entries in self.files for entry in entries)

    @property
    @abstractmethod
    def sizes(self) -> list[int]:
        """Size of each file in bytes, as far as it is known beforehand."""

    @property
    @abstractmethod
    def names(self) -> list[list[Any]]:
        """The names of the entries of each file."""

    @abstractmethod
    def copy(self, writers: CheckpointGroup, arenas: Arenas) -> Callable[[], None]:
        """Copy what this rank writes to host memory, after which the originals may change."""

    @abstractmethod
    def write(self, writers: CheckpointGroup, arenas: Arenas, paths: Sequence[Path]) -> None:
        """Write the files."""


@final
class SafetensorsWriter(FileWriter):
    """Files of safetensors, into which every rank writes what it holds."""

    def __init__(self, files: Sequence[Sequence[Entry]], save_id: str, rank: int, plain: Any = None) -> None:
        super().__init__(files, save_id)
        _check_dtypes(files)
        self._block_writes = assign_blocks(files, rank)
        self._own = [block_write for block_write in self._block_writes if block_write.rank == rank]
        self._contents = [block_write.tensor for block_write in self._own if block_write.tensor is not None]
        blocks: dict[tuple[int, str], list[Region]] = {}
        for block_write in self._block_writes:
            blocks.setdefault((block_write.file, block_write.name), []).append(block_write.block)
        last = len(files) - 1
        self._headers = [
            Header.from_tensors(
                [(e.names[0], e.dtype, e.shape, blocks.get((n, e.names[0]), [])) for e in entries if e.dtype],
                plain if n == last else None,
                save_id,
            )
            for n, entries in enumerate(files)
        ]
        self._starts = [len(header.encode()) for header in self._headers]

    @property
    def sizes(self) -> list[int]:
        """Size of each file in bytes."""
        return [start + header.data_bytes for start, header in zip(self._starts, self._headers, strict=True)]

    @property
    def names(self) -> list[list[Any]]:
        """The names of the tensors of each file."""
        return [[entry.names[0] for entry in entries] for entries in self.files]

    def copy(self, writers: CheckpointGroup, arenas: Arenas) -> Callable[[], None]:  # noqa: ARG002
        """Copy the blocks that this rank writes."""
        arena: Arena = arenas.take(self._contents)
        self._contents = arena.copy(self._contents)
        return lambda: arenas.give_back(arena)

    def write(self, writers: CheckpointGroup, arenas: Arenas, paths: Sequence[Path]) -> None:
        """Write this rank's blocks, and on the first rank the headers with the digests of all."""
        digests = writers.gather(lambda: self._write_blocks(arenas, paths))
        writers.write(lambda: self._write_headers(paths, [each for part in digests for each in part]))

    def _write_blocks(self, arenas: Arenas, paths: Sequence[Path]) -> Digests:
        descriptors = [os.open(path, os.O_WRONLY) for path in paths]
        try:
            digests: Digests = []
            for part in batches(self._contents):
                with arenas.on_host(self._contents[part]) as contents:
                    work = list(zip(self._own[part], contents, strict=True))
                    digests += map_in_threads(lambda each: self._write_block(descriptors, *each), work, _THREADS)
            for number in sorted({block_write.file for block_write in self._own}):
                # before this rank reports: the rename of the index must not reach the disk before the data do
                os.fsync(descriptors[number])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return digests

    def _write_block(self, descriptors: Sequence[int], block_write: BlockWrite, tensor: torch.Tensor) -> Any:
        place = self._headers[block_write.file].places[block_write.name]
        content = bytes_of(tensor.contiguous())
        write_block(descriptors[block_write.file], self._starts[block_write.file], place, block_write.block, content)
        return block_write.file, block_write.name, block_write.block, block_digest(place, block_write.block, content)

    def _write_headers(self, paths: Sequence[Path], digests: Digests) -> None:
        for number, name, block, digest in digests:
            self._headers[number].places[name].blocks[block] = digest
        for path, header in zip(paths, self._headers, strict=True):
            with path.open("r+b") as file:
                file.write(header.encode())
            sync(path)


@final
class TorchFileWriter(FileWriter):
    """Files in PyTorch's own format, which the first rank writes from full tensors."""

    def __init__(
        self,
        files: Sequence[Sequence[Entry]],
        gather_full: Callable[[Entry, CheckpointGroup], Any],
        finish: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        super().__init__(files, "")
        self._gather_full, self._finish = gather_full, finish
        self._copies: list[dict[str, Any]] | None = None

    @property
    def sizes(self) -> list[int]:
        """Size of the tensors of each file in bytes: a little less than that of the file."""
        return [sum(entry.num_bytes for entry in entries) for entries in self.files]

    @property
    def names(self) -> list[list[Any]]:
        """All names of the entries of each file."""
        return [[name for entry in entries for name in entry.names] for entries in self.files]

    def copy(self, writers: CheckpointGroup, arenas: Arenas) -> Callable[[], None]:
        """Gather full tensors on the first rank, and copy them."""
        contents = [self._gather(entries, writers) for entries in self.files]
        tensors = [t for content in contents for t in _distinct(content)]
        arena = arenas.take(tensors)
        copies = arena.copy(tensors)
        self._copies = [_replaced(content, tensors, copies) for content in contents]
        return lambda: arenas.give_back(arena)

    def write(self, writers: CheckpointGroup, arenas: Arenas, paths: Sequence[Path]) -> None:
        """Write one file after the other, so that at most one full file is in memory."""
        for number, path in enumerate(paths):
            content = self._copies[number] if self._copies else self._gather(self.files[number], writers)
            writers.write(lambda path=path, content=content: self._write_file(arenas, path, content))

    def _write_file(self, arenas: Arenas, path: Path, content: dict[str, Any]) -> None:
        tensors = _distinct(content)
        with arenas.on_host(tensors) as copies:
            self._write(path, _replaced(content, tensors, copies))

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        try:
            write_torch(path, self._finish(content))
        except OSError as error:
            raise cannot_write(path, error) from error
        sync(path)

    def _gather(self, entries: Sequence[Entry], writers: CheckpointGroup) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for entry in entries:
            value = self._gather_full(entry, writers) if entry.layout else entry.value
            content.update(dict.fromkeys(entry.names, value) if writers.is_first_rank else {})
        return content


def run_save(save: FileWriter, writers: CheckpointGroup, arenas: Arenas, destination: Destination) -> None:
    """Write the files of a save and put them in place, all ranks together."""
    try:
        paths = writers.gather(lambda: destination.reserve(save.sizes) if writers.is_first_rank else [])[0]
        save.write(writers, arenas, paths)
        writers.write(lambda: destination.commit(save.names, save.total_size, save.save_id))
    finally:
        destination.close()


def _check_dtypes(files: Sequence[Sequence[Entry]]) -> None:
    entries = [entry for each in files for entry in each]
    foreign = [f"{entry.names[0]} ({entry.dtype})" for entry in entries if entry.dtype not in CODES]
    if foreign:
        raise CheckpointError(
            f"A safetensors file can hold the dtypes {', '.join(sorted(CODES.values()))}. Found {listing(foreign)}. "
            "Pass use_safetensors=False for such a model, or cast these tensors."
        )


def _distinct(content: dict[str, Any]) -> list[torch.Tensor]:
    tensors = {id(value): value for value in content.values() if isinstance(value, torch.Tensor)}
    return list(tensors.values())


def _replaced(
    content: dict[str, Any], tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Return a content with other tensors in the place of its own."""
    found = dict(zip(map(id, tensors), copies, strict=True))
    return {name: found.get(id(value), value) for name, value in content.items()}
