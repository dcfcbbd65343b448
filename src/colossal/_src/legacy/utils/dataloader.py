"""Data loaders that give each data-parallel rank its samples."""

from collections.abc import Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from colossal._src.legacy.notice import superseded
from colossal._src.legacy.utils.parallel_state import axis_rank, axis_size
from colossal.errors import ConfigError, UnsupportedError


@final
class DataParallelSampler(DistributedSampler[Any]):
    """Splits a dataset over the data-parallel ranks of the mesh, in a new order for each epoch.

    Each new iterator begins the next epoch, so that `set_epoch` is not needed; a program that resumes calls it once.
    Where the ranks do not divide the dataset, the first samples are repeated, or with `drop_last` the last ones left
    out.

    Args:
        dataset: A dataset with a length.
        shuffle: Draw a new order for each epoch.
        seed: Of the order; the same on all ranks.
        drop_last: Leave out samples instead of repeating some.

    Example:
        >>> from colossal.legacy.utils import DataParallelSampler
        >>> list(DataParallelSampler(range(3)))
        [0, 1, 2]
    """

    def __init__(self, dataset: Dataset[Any], shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> None:
        super().__init__(dataset, axis_size("dp"), axis_rank("dp"), shuffle, seed, drop_last)

    def __iter__(self) -> Iterator[int]:
        """Return the indices of this rank's samples in the current epoch, and go on to the next."""
        indices = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return indices


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Make a data loader that gives each data-parallel rank its own samples.

    Args:
        dataset: A dataset with a length.
        shuffle: Draw a new order for each epoch.
        seed: Of the order, and of the random generators of worker processes; the same on all ranks.
        add_sampler: Split the dataset over the ranks; all ranks get all samples otherwise.
        drop_last: Leave out the samples that do not fill a batch on every rank.
        pin_memory: Put batches into page-locked memory.
        num_workers: Number of processes that load samples; 0 loads in this one.
        **kwargs: Passed to `torch.utils.data.DataLoader`, such as ``batch_size``.

    Returns:
        The loader of this rank's batches.

    Raises:
        ConfigError: `kwargs` names a sampler while one is added.
        UnsupportedError: An iterable dataset is to be split, and has no order.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import get_dataloader
        >>> len(get_dataloader(torch.utils.data.TensorDataset(torch.zeros(6, 2)), batch_size=2))
        3
    """
    superseded("colossal.utils.get_dataloader", "plugin.prepare_dataloader(dataset, batch_size, shuffle=...)")
    options: dict[str, Any] = {"shuffle": shuffle}
    if add_sampler:
        _check_divisible(dataset, kwargs)
        options = {"sampler": DataParallelSampler(dataset, shuffle, seed, drop_last)}
    from colossal._src.booster.plugin import seed_worker

    return DataLoader(
        dataset,
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        # workers take their seeds from it: those of two ranks must not augment their samples in the same way
        generator=torch.Generator().manual_seed(seed + axis_rank("dp") if add_sampler else seed),
        worker_init_fn=kwargs.pop("worker_init_fn", seed_worker),
        **options,
        **kwargs,
    )


def _check_divisible(dataset: Dataset[Any], kwargs: dict[str, Any]) -> None:
    if clash := {"sampler", "batch_sampler"} & kwargs.keys():
        raise ConfigError(
            f"get_dataloader adds the sampler that splits the dataset over ranks. Found {', '.join(clash)}. Pass "
            "add_sampler=False to use your own."
        )
    if isinstance(dataset, IterableDataset):
        raise UnsupportedError(
            f"get_dataloader splits a dataset by index. Found {type(dataset).__name__}, an IterableDataset. Split it "
            "by rank in its __iter__, and pass add_sampler=False."
        )
