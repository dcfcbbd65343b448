"""Optimizer states that are stored on disk and are loaded into memory one entry at a time."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self, final

import torch

from colossal._src.kernel import huge_zeros
from colossal._src.offload.direct_io import DirectIO
from colossal._src.offload.scratch_file import padded
from colossal._src.offload.tensor_file import FileRequest, TensorFile
from colossal.errors import ColossalError, ConfigError, ShapeError

_ALIGN = 16  # elements: a line of the cache


class _PendingLoad(NamedTuple):
    """A buffer that is being read into or written from."""

    entry: int
    buffer: torch.Tensor
    request: FileRequest


@final
class _Walk:
    """The transfers of a walk: reads of the next entries and writes of the previous ones, each in order."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.free = list(buffers)
        self.reading: deque[_PendingLoad] = deque()
        self.writing: deque[_PendingLoad] = deque()

    def finish(self) -> ColossalError | None:
        """Wait for everything; return the first error."""
        errors: list[ColossalError] = []
        for flight in (*self.writing, *self.reading):
            try:
                flight.request.wait()
            except ColossalError as error:
                errors.append(error)
        return errors[0] if errors else None


@final
class StateStore:
    """Entries of some float32 tensors each on a disk, such as the two moments of Adam for each parameter.

    A walk over them prefetches the next entries and writes back the previous ones while the caller computes on the
    current one. It takes a fixed number of buffers, each as large as the largest entry: split very large tensors into
    several entries.

    Args:
        directory: The directory of the file, as for `TensorFile`; it exists.
        numels: For each entry, the number of elements of each of its tensors.
        tensors_per_entry: How many tensors an entry has.
        ahead: How many entries are prefetched, and how many may be under way to the disk: there are ``2 * ahead + 1``
            buffers.
        engine: As for `TensorFile`.
        direct: As for `TensorFile`.

    Attributes:
        file: The file.
        num_buffer_bytes: The memory of all buffers.

    Raises:
        ConfigError: The directory is missing, may not be written to, or has too little room; or a number
            is out of range.
        UnsupportedError: The machine does not allow the engine.

    Source: Rajbhandari et al., "ZeRO-Infinity", 2021, https://arxiv.org/abs/2104.07857, section 6.

    Example:
        >>> import tempfile
        >>> from colossal.offload import StateStore
        >>> with tempfile.TemporaryDirectory() as directory, StateStore(directory, [2, 3]) as store:
        ...     for index, (exp_avg, exp_avg_sq) in store.walk():
        ...         _ = exp_avg.fill_(index + 1), exp_avg_sq.add_(5)
        ...     store.load(1)
        [tensor([2., 2., 2.]), tensor([5., 5., 5.])]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        numels: Sequence[int],
        tensors_per_entry: int = 2,
        ahead: int = 2,
        engine: str | None = None,
        direct: DirectIO | None = None,
    ) -> None:
        if min(numels, default=0) < 0 or tensors_per_entry < 1 or ahead < 1:
            raise ConfigError(
                "A store of states has entries of 0 elements or more, at least 1 tensor in each, and reads at least 1 "
                f"ahead. Found {min(numels, default=0)} elements, {tensors_per_entry} tensors and {ahead} ahead. "
                "Pass no number below these; the defaults are tensors_per_entry=2 and ahead=2."
            )
        self._numels = tuple(numels)
        self._num_tensors = tensors_per_entry
        self._ahead = ahead
        sizes = [padded(self._stride(index) * tensors_per_entry * 4) for index in range(len(self._numels))]
        self.file = TensorFile(directory, sizes, engine, direct)
        # one for the entry in use, and `ahead` each for what is being read and written
        self._buffers = huge_zeros([(max(sizes, default=0),)] * (2 * ahead + 1), torch.uint8)
        self.num_buffer_bytes = sum(buffer.nbytes for buffer in self._buffers)
        self._is_busy = False
        self._failure: ColossalError | None = None

    def __len__(self) -> int:
        return len(self._numels)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *others: object) -> None:
        if kind is None:
            self.close()
        else:
            self.file.__exit__(kind, *others)

    def walk(
        self, indices: Iterable[int] | None = None, is_read_only: bool = False
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Visit entries; what the body of the loop leaves in their tensors is written back.

        At the end of the loop all writes are done. If the body raises or leaves the loop, everything under way is
        waited for, and the entry of that turn alone is not written back. If one of those waits finds an error, the next
        use of the store raises it.

        Args:
            indices: Which entries, each once, in this order; all by default.
            is_read_only: Leave the file as it is.

        Returns:
            An iterator over the number of each entry, and its tensors, which are its own until the next turn only.

        Raises:
            CheckpointError: Reading or writing failed.
            ConfigError: An index is out of range or occurs twice, or the loop over another walk has not ended.
        """
        order = list(range(len(self))) if indices is None else list(indices)
        if len(set(order)) < len(order) or not set(order) <= set(range(len(self))):
            raise ConfigError(
                f"A walk visits each of the entries 0 to {len(self) - 1} at most once. Found {order}. "
                "Name each once, by its number from 0."
            )
        return self._visit(deque(order), is_read_only)

    def load(self, index: int) -> list[torch.Tensor]:
        """Return an entry, for a checkpoint.

        Args:
            index: Its number.

        Returns:
            Its tensors, in memory of their own.

        Raises:
            CheckpointError: Reading failed.
            ConfigError: The index is out of range, or the loop over a walk has not ended.
        """
        (copies,) = [[one.clone() for one in found] for _, found in self.walk([index], is_read_only=True)]
        return copies

    def store(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        """Replace an entry, from a checkpoint.

        Args:
            index: Its number.
            tensors: As many as an entry has, each of its number of elements; they are converted to float32.

        Raises:
            CheckpointError: Writing failed.
            ConfigError: The index is out of range, or the loop over a walk has not ended.
            ShapeError: The tensors are not of the entry's number or size.
        """
        for at, own in self.walk([index]):
            if [one.numel() for one in tensors] != [one.numel() for one in own]:
                raise ShapeError(
                    f"Entry {at} takes {len(own)} tensors of {self._numels[at]} elements. Found "
                    f"{[tuple(one.shape) for one in tensors]}. Pass those of the same parameter."
                )
            for target, source in zip(own, tensors, strict=True):
                target.copy_(source.detach().reshape(-1))

    def close(self) -> None:
        """Free the disk space; later calls do nothing.

        Raises:
            CheckpointError: A write failed after a loop was left, and the error was not raised yet.
        """
        self.file.close()
        self._raise_failure()

    def _visit(self, order: deque[int], is_read_only: bool) -> Iterator[tuple[int, list[torch.Tensor]]]:
        self._claim()
        walk, is_left = _Walk(self._buffers), False
        try:
            while order or walk.reading:
                self._read_ahead(walk, order)
                walk.reading[0].request.wait()
                index, buffer, _ = walk.reading.popleft()
                yield index, self._tensors(index, buffer)
                if is_read_only:
                    walk.free.append(buffer)
                else:
                    written = buffer[: self.file.slot_sizes[index]]
                    walk.writing.append(_PendingLoad(index, buffer, self.file.write(index, written)))
        except GeneratorExit:
            is_left = True
            raise
        finally:
            # also after an error: the next walk takes the buffers that these transfers use
            failure = walk.finish()
            self._failure = failure if is_left else None  # what is raised here needs no second mention
            self._is_busy = False
        if failure is not None:
            raise failure

    def _read_ahead(self, walk: _Walk, order: deque[int]) -> None:
        """Begin reads until enough are under way: into a buffer that is free, or else the one written the longest."""
        while order and len(walk.reading) <= self._ahead:
            if not walk.free:
                walk.writing[0].request.wait()
                walk.free.append(walk.writing.popleft().buffer)
            buffer = walk.free.pop()
            request = self.file.read(order[0], buffer[: self.file.slot_sizes[order[0]]])
            walk.reading.append(_PendingLoad(order.popleft(), buffer, request))

    def _tensors(self, index: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        stride, numel = self._stride(index), self._numels[index]
        values = buffer[: buffer.numel() // 4 * 4].view(torch.float32)
        return [values[at * stride : at * stride + numel] for at in range(self._num_tensors)]

    def _stride(self, index: int) -> int:
        """Return the distance between the tensors of an entry, in elements."""
        return -(-self._numels[index] // _ALIGN) * _ALIGN

    def _claim(self) -> None:
        self._raise_failure()
        if self._is_busy:
            raise ConfigError(
                "A store of states is used by one loop at a time. Found that a walk has not ended. "
                "Use it after the loop."
            )
        self._is_busy = True

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
