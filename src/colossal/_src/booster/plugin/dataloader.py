"""Data loaders that give each data-parallel rank its samples, and that resume on any number of ranks."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, cast, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from colossal._src.comm import stream_seed
from colossal._src.interface import num_boosted_steps
from colossal.errors import ConfigError, UnsupportedError
from colossal.logging import get_dist_logger


@final
@dataclass(frozen=True, eq=False)
class _Begun:
    """An epoch of which an iterator was opened."""

    epoch: int
    start: int
    num_steps: int  # that boosted optimizers had made then


class EpochCounter:
    """Chooses the epoch of each new iterator of a loader, so that the program need not call `set_epoch`."""

    epoch = 0
    start = 0
    """How many samples the next epoch leaves out, because all ranks together have read them before."""

    _begun: _Begun | None = None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator be of this epoch: what is left of it, if that is where the loader stands."""
        self._forget_looks()
        if epoch != self.epoch:
            self.start = 0  # samples that were read are of another epoch
        self.epoch, self._begun = epoch, None

    def begin(self) -> _Begun:
        """Choose the epoch of a new iterator: that of the last one, if that was only looked at."""
        self._forget_looks()
        self._begun = _Begun(self.epoch, self.start, num_boosted_steps())
        return self._begun

    def _forget_looks(self) -> None:
        """Go back to where the last iterator began, if that was only looked at."""
        last = self._begun
        if last is not None and last.num_steps == num_boosted_steps():
            self.epoch, self.start = last.epoch, last.start

    def go_on(self, begun: _Begun) -> None:
        """Let the epoch after that of an iterator come next, whatever was opened since its last batch."""
        if self._begun not in (None, begun):
            self.epoch, self.start, self._begun = begun.epoch + 1, 0, begun

    def finish(self) -> None:
        """Let the next iterator be of the next epoch: all samples of this one were read."""
        self._begun = None


@final
class EpochSampler(EpochCounter, DistributedSampler[Any]):
    """Splits a dataset across the data-parallel ranks, in a new order for each epoch.

    Each new iterator begins the next epoch, so that `set_epoch` is not needed; a program that resumes calls it
    once. An iterator that was left before a boosted optimizer made a step does not count: a rank that alone looks at a
    batch would read other samples than the others from then on. All arguments are those of
    `torch.utils.data.DistributedSampler`: where the ranks do not divide the dataset, the first samples are repeated,
    or with ``drop_last=True`` the last ones left out.
    """

    def __iter__(self) -> Iterator[int]:
        """Return the indices of this rank's samples in the current epoch, and go on to the next."""
        size = len(cast("Any", self.dataset))
        generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
        order: list[int] = list(range(size))
        if self.shuffle:
            order = torch.randperm(size, generator=generator, device="cpu").tolist()
        left = order[self.start :]
        surplus = len(left) % self.num_replicas
        if surplus and self.drop_last:
            left = left[:-surplus]
        elif surplus:
            left += islice(cycle(order), self.num_replicas - surplus)
        self.epoch += 1
        self.start = 0
        return iter(left[self.rank :: self.num_replicas])


class ResumableLoader(DataLoader[Any], ABC):
    """Counts the samples that all ranks have read; they say where any number of ranks go on."""

    _position = (0, 0)

    def __init__(self, dataset: Dataset[Any], *, generator: torch.Generator, **options: Any) -> None:
        super().__init__(dataset, generator=generator, **options)
        self._worker_generator, self._worker_seed = generator, generator.initial_seed()

    def _seed_workers(self, begun: _Begun) -> None:
        """Let what workers draw follow from the epoch, as its order does: a run that resumes draws the same."""
        self._worker_generator.manual_seed(stream_seed(self._worker_seed, begun.epoch, begun.start))

    @property
    @abstractmethod
    def num_new_samples(self) -> int:
        """How many samples of the current batch, on all ranks, no rank has read before; the others fill it up."""

    @property
    @abstractmethod
    def _seed(self) -> int | None: ...

    @abstractmethod
    def _go_on(self, epoch: int, samples: int) -> None:
        """Let the next iterator begin at a position."""

    def state_dict(self) -> dict[str, int | None]:
        """Return the position in the data, and the seed of its order; the same on all ranks."""
        epoch, samples = self._position
        return {"epoch": epoch, "samples": samples, "seed": self._seed}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Reject a position in another order."""
        if (seed := state.get("seed", self._seed)) != self._seed:
            raise ConfigError(
                f"A loader resumes in the order in which it was saved. Found seed={seed} saved and seed={self._seed} "
                "here, None without shuffle. Pass the same shuffle and seed to prepare_dataloader."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a position, of any number of ranks and any batch size."""
        self.check_state_dict(state)
        self._go_on(state["epoch"], state["samples"])


@final
class ShardedLoader(ResumableLoader):
    """Reads a dataset by index."""

    @property
    def _batch_of_all_ranks(self) -> int:
        return cast("int", self.batch_size) * cast("EpochSampler", self.sampler).num_replicas

    def state_dict(self) -> dict[str, int | None]:
        """Return the position in the data, and also how many samples the ranks read at once."""
        return {**super().state_dict(), "batch": self._batch_of_all_ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position, and say where steps may be others from here on."""
        super().load_state_dict(state)
        own = self._batch_of_all_ranks
        if (saved := state.get("batch", own)) != own:
            sampler = cast("EpochSampler", self.sampler)
            # not an error: a program may have changed how many batches make a step as well
            get_dist_logger().warning(
                f"A run that resumes keeps the samples of a step. Found batches of {own} samples here, "
                f"{self.batch_size} on each of {sampler.num_replicas} ranks that have different data, and of {saved} "
                f"when it was saved: steps that take one batch differ from here on. For {saved}, "
                f"{_advice(saved, sampler.num_replicas)}.",
                ranks=[0],
            )

    @property
    def description(self) -> dict[str, object]:
        """What all ranks must have, so that each sample is read once, by what it is called."""
        size = len(cast("Any", self.dataset))
        return {
            "seed": self._seed,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "length": size,
        }

    @property
    def num_new_samples(self) -> int:
        """How many samples of the current batch, on all ranks, no rank has read before; the others fill it up."""
        end, size = self._position[1], len(cast("Any", self.dataset))
        return self._batch_of_all_ranks - max(0, end - size)

    def __iter__(self) -> Any:
        """Go through the rest of the current epoch; a batch counts as read when the program gets it."""
        sampler = cast("EpochSampler", self.sampler)
        begun = sampler.begin()
        self._seed_workers(begun)
        epoch, samples = self._position = begun.epoch, begun.start
        for batch in super().__iter__():
            samples += self._batch_of_all_ranks
            self._position = epoch, samples
            yield batch
            sampler.go_on(begun)
        sampler.finish()
        self._position = epoch + 1, 0

    @property
    def _seed(self) -> int | None:
        sampler = cast("EpochSampler", self.sampler)
        return sampler.seed if sampler.shuffle else None

    def _go_on(self, epoch: int, samples: int) -> None:
        sampler, size = cast("EpochSampler", self.sampler), len(cast("Any", self.dataset))
        if samples and samples + (self._batch_of_all_ranks if self.drop_last else 1) > size:
            epoch, samples = epoch + 1, 0
        sampler.set_epoch(epoch)
        sampler.start = samples
        self._position = epoch, samples


def _advice(samples: int, num_replicas: int) -> str:
    if samples % num_replicas == 0:
        return f"pass batch_size={samples // num_replicas} to prepare_dataloader"
    return f"take a number of such ranks that divides {samples}"


def check_loader(dataset: Dataset[Any], batch_size: int, shuffle: bool, kwargs: dict[str, Any]) -> None:
    """Reject what has no order to divide, and a second sampler."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(
            f"A batch has a whole number of samples on each rank, at least 1. Found batch_size={batch_size!r}. Pass an "
            "int; for a dataset whose samples are batches, 1 and a collate_fn that returns the only one."
        )
    if "generator" in kwargs:
        raise ConfigError(
            "The order of samples and the random numbers of workers follow from seed, the same on all ranks. Found "
            "generator. Pass seed=generator.initial_seed() instead."
        )
    if clash := {"sampler", "batch_sampler"} & kwargs.keys():
        raise ConfigError(
            f"prepare_dataloader makes the sampler that shards the dataset. Found {', '.join(clash)}. "
            "Pass distributed_sampler_cls, or build a torch DataLoader yourself."
        )
    if isinstance(dataset, IterableDataset):
        check_stream(dataset, shuffle)
        return
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"A dataset that is read by index has a length, by which ranks shard it. Found {type(dataset).__name__} "
            "without __len__. Define it, or inherit from torch.utils.data.IterableDataset."
        )
    if shuffle and len(cast("Any", dataset)) == 0:  # without it, one that is evaluated on nothing
        raise ConfigError(
            f"A dataset that is shuffled has at least 1 sample. Found an empty {type(dataset).__name__}. Check the "
            "path and the filters that it was made with."
        )


def check_stream(dataset: IterableDataset[Any], shuffle: bool) -> None:
    """Reject a stream that would have to be shuffled, or was sharded before."""
    if shuffle:
        raise UnsupportedError(
            f"An IterableDataset has the order in which it yields. Found shuffle=True for {type(dataset).__name__}. "
            "Leave it out, and shuffle in the dataset, equally on all ranks, by the epoch that set_epoch gets."
        )
    if getattr(dataset, "_distributed", None) is not None:  # of `datasets`
        raise ConfigError(
            "prepare_dataloader shards a stream, and each rank passes the full one. Found one of "
            "split_dataset_by_node. Leave out that call."
        )


def check_full_batches(dataset: Dataset[Any], batch_size: int, num_replicas: int) -> None:
    """Reject a dataset of which `drop_last` leaves no batch: a loop over its steps would never end."""
    if 0 < (found := len(cast("Any", dataset))) < batch_size * num_replicas:
        raise ConfigError(
            f"drop_last=True leaves out what does not fill a batch of {batch_size} samples on each of {num_replicas} "
            f"ranks. Found {found} samples, so that no batch is left. Pass a smaller batch_size, or drop_last=False."
        )


def check_resumable(dataloader: DataLoader[Any] | None) -> None:
    """Reject loaders whose position cannot be saved."""
    if dataloader is not None and not isinstance(dataloader, ResumableLoader):
        raise ConfigError(
            "A checkpoint holds the position of a loader from plugin.prepare_dataloader, without "
            f"distributed_sampler_cls. Found a {type(dataloader).__name__}. Make it there, or leave it out, and save "
            "its state next to the checkpoint."
        )


def seed_worker(_worker: int) -> None:
    """Seed NumPy and `random` in a worker by what torch drew for it, so that no two generators draw the same."""
    seed = torch.initial_seed()
    random.seed(stream_seed(seed, 1))
    np.random.seed(stream_seed(seed, 2) % 2**32)  # noqa: NPY002 (transforms draw from the legacy generator)
