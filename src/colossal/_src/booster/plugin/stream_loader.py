"""Data loaders of `IterableDataset`: each data-parallel rank reads the stream and takes its samples, in any worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any, final

import torch
from torch.utils.data import DistributedSampler, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from colossal._src.booster.plugin.dataloader import EpochCounter, ResumableLoader
from colossal.errors import UnsupportedError


@final
class _StreamShard(IterableDataset[Any]):
    """The samples of one rank, each with the number of ranks whose sample only fills up the row.

    A row has one sample for each rank. Sample k of the stream is in the same batch of all ranks for any number of
    ranks, and of workers: worker w of n makes batches w, w + n, and so on, in the order that torch reads them in.
    """

    def __init__(self, dataset: IterableDataset[Any], rank: int, size: int, options: dict[str, Any]) -> None:
        self.dataset, self.rank, self.size = dataset, rank, size
        self._batch_size, self._drop_last = options["batch_size"], options["drop_last"]
        is_shared = options["num_workers"] > 0 and options.get("persistent_workers", False)
        # workers that end with the epoch get it as it was when they began, and others must see what comes next
        self._position: Any = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_() if is_shared else [0, 0]

    def set_position(self, epoch: int, start: int) -> None:
        """Choose what the next iterator reads."""
        self._position[0], self._position[1] = epoch, start

    def __len__(self) -> int:
        num_rows, rest = divmod(len(self.dataset), self.size)  # type: ignore[arg-type]
        return num_rows + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        epoch, start = map(int, self._position)  # now, and not when the first sample is asked for
        return self._read(epoch, start)

    def _read(self, epoch: int, start: int) -> Iterator[tuple[int, Any]]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number, (num_missing, row) in enumerate(self._rows(epoch, start)):
            if number // self._batch_size % num_workers == worker:
                yield num_missing, row[self.rank]

    def _rows(self, epoch: int, start: int) -> Iterator[tuple[int, list[Any]]]:
        first, row = list[Any](), list[Any]()
        for number, sample in enumerate(_samples(self.dataset, epoch)):
            if len(first) < self.size:
                first.append(sample)
            if number < start:
                continue
            row.append(sample)
            if len(row) == self.size:
                yield 0, row
                row = []
        if row and not self._drop_last:
            num_missing = self.size - len(row)
            yield num_missing, [*row, *islice(cycle(first), num_missing)]


def _samples(dataset: Any, epoch: int) -> Iterator[Any]:
    """Read a full stream, in a worker too: one that knows of workers would leave samples to others."""
    with _without_worker_info():
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        samples = iter(dataset)
    while True:
        with _without_worker_info():
            try:
                sample = next(samples)
            except StopIteration:
                return
        yield sample


@contextmanager
def _without_worker_info() -> Iterator[None]:
    info = torch_worker._worker_info  # noqa: SLF001 (what get_worker_info returns; it has no other switch)
    torch_worker._worker_info = None  # noqa: SLF001
    try:
        yield
    finally:
        torch_worker._worker_info = info  # noqa: SLF001


@final
class _Collator:
    """Makes a batch, and counts the samples of all ranks in it that do not only fill it up."""

    def __init__(self, collate: Any, size: int) -> None:
        self._collate, self._size = collate, size

    def __call__(self, samples: list[tuple[int, Any]]) -> tuple[int, Any]:
        """Make it of the samples of a rank."""
        num_new = len(samples) * self._size - sum(num_missing for num_missing, _ in samples)
        return num_new, self._collate([sample for _, sample in samples])


@final
class StreamLoader(ResumableLoader):
    """Reads the stream from its beginning in each epoch, and passes over what all ranks have read before."""

    def __init__(self, shard: _StreamShard, **options: Any) -> None:
        options["collate_fn"] = _Collator(options.get("collate_fn") or default_collate, shard.size)
        super().__init__(shard, **options)
        self._shard, self._counter, self._num_new = shard, EpochCounter(), 0

    @property
    def num_new_samples(self) -> int:
        """How many samples of the current batch, on all ranks, no rank has read before; the others fill it up."""
        return self._num_new

    def __iter__(self) -> Any:
        """Go through the rest of the current epoch; a batch counts as read when the program gets it."""
        counter = self._counter
        begun = counter.begin()
        self._seed_workers(begun)
        epoch, samples = self._position = begun.epoch, begun.start
        self._shard.set_position(epoch, samples)
        counter.epoch, counter.start = epoch + 1, 0
        for self._num_new, batch in super().__iter__():
            samples += self._num_new
            self._position = epoch, samples
            yield batch
            counter.go_on(begun)
        counter.finish()
        self._position = epoch + 1, 0
        if begun.start and samples == begun.start:  # saved after the last batch, which was not known to be the last
            yield from self

    @property
    def _seed(self) -> int | None:
        return None

    def _go_on(self, epoch: int, samples: int) -> None:
        self._counter.set_epoch(epoch)
        self._counter.start = samples
        self._position = epoch, samples


def make_stream_loader(
    dataset: IterableDataset[Any],
    rank: int,
    size: int,
    sampler_cls: type[DistributedSampler[Any]] | None,
    options: dict[str, Any],
) -> StreamLoader:
    """Make a loader of the samples that are a rank's."""
    if sampler_cls is not None:
        raise UnsupportedError(
            "A sampler draws indices of samples, and an IterableDataset has none. Found "
            f"distributed_sampler_cls={sampler_cls.__name__}. Leave it out: each rank takes every {size}. sample."
        )
    return StreamLoader(_StreamShard(dataset, rank, size, options), **options)
