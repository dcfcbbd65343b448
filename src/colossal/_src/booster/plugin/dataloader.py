"""Data loaders that give each data-parallel rank its samples, and that resume on any number of ranks."""

import random
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, cast, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from colossal.errors import ConfigError, UnsupportedError


@final
class EpochSampler(DistributedSampler[Any]):
    """Splits a dataset across the data-parallel ranks, in a new order for each epoch.

    Each new iterator begins the next epoch, so that `set_epoch` is not needed; a program that resumes calls it
    once. All arguments are those of `torch.utils.data.DistributedSampler`: where the ranks do not divide the
    dataset, the first samples are repeated, or with ``drop_last=True`` the last ones left out.
    """

    start = 0
    """How many samples the next epoch leaves out, because all ranks together have read them before."""

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
        self.set_epoch(self.epoch + 1)
        self.start = 0
        return iter(left[self.rank :: self.num_replicas])


@final
class ResumableLoader(DataLoader[Any]):
    """Counts the samples that all ranks have read; they say where any number of ranks go on."""

    _position = (0, 0)

    @property
    def _batch_of_all_ranks(self) -> int:
        return cast("int", self.batch_size) * cast("EpochSampler", self.sampler).num_replicas

    @property
    def num_new_samples(self) -> int:
        """How many samples of the current batch, on all ranks, no rank has read before; the others fill it up."""
        end, size = self._position[1], len(cast("Any", self.dataset))
        return self._batch_of_all_ranks - max(0, end - size)

    def __iter__(self) -> Any:
        """Go through the rest of the current epoch; a batch counts as read when the program gets it."""
        sampler = cast("EpochSampler", self.sampler)
        epoch, samples = self._position = sampler.epoch, sampler.start
        for batch in super().__iter__():
            samples += self._batch_of_all_ranks
            self._position = epoch, samples
            yield batch
        self._position = epoch + 1, 0

    @property
    def _seed(self) -> int | None:
        sampler = cast("EpochSampler", self.sampler)
        return sampler.seed if sampler.shuffle else None

    def state_dict(self) -> dict[str, int | None]:
        """Return the position in the data, and the seed of its order; the same on all ranks."""
        epoch, samples = self._position
        return {"epoch": epoch, "samples": samples, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a position, of any number of ranks and any batch size."""
        epoch, samples, sampler = state["epoch"], state["samples"], cast("EpochSampler", self.sampler)
        if (seed := state.get("seed", self._seed)) != self._seed:
            raise ConfigError(
                f"A loader resumes in the order in which it was saved. Found seed={seed} saved and seed={self._seed} "
                "here, None without shuffle. Pass the same shuffle and seed to prepare_dataloader."
            )
        size = len(cast("Any", self.dataset))
        if samples and samples + (self._batch_of_all_ranks if self.drop_last else 1) > size:
            epoch, samples = epoch + 1, 0
        sampler.set_epoch(epoch)
        sampler.start = samples
        self._position = epoch, samples


def check_loader(dataset: Dataset[Any], batch_size: int, kwargs: dict[str, Any]) -> None:
    """Reject what has no order to divide, and a second sampler."""
    if batch_size < 1:
        raise ConfigError(f"A batch has at least 1 sample on each rank. Found batch_size={batch_size}. Pass 1 or more.")
    if clash := {"sampler", "batch_sampler"} & kwargs.keys():
        raise ConfigError(
            f"prepare_dataloader makes the sampler that shards the dataset. Found {', '.join(clash)}. "
            "Pass distributed_sampler_cls, or build a torch DataLoader yourself."
        )
    if isinstance(dataset, IterableDataset):
        raise UnsupportedError(
            f"prepare_dataloader shards a dataset by index. Found {type(dataset).__name__}, an IterableDataset. "
            "Shard it by rank in its __iter__, and build a torch DataLoader."
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
    """Give NumPy and `random` in a worker the seed that torch drew for it; otherwise all workers draw the same."""
    seed = torch.initial_seed()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (transforms draw from the legacy generator)
