"""Which samples a rank sees."""

from collections.abc import Iterator
from typing import Any, final

from torch.utils.data import DistributedSampler


@final
class EpochSampler(DistributedSampler[Any]):
    """Splits a dataset across the data-parallel ranks, in a new order for each epoch.

    Each new iterator begins the next epoch, so that `set_epoch` is not needed; a program that resumes calls it
    once. All arguments are those of `torch.utils.data.DistributedSampler`: where the ranks do not divide the
    dataset, the first samples are repeated, or with ``drop_last=True`` the last ones left out.
    """

    def __iter__(self) -> Iterator[int]:
        """Return the indices of this rank's samples in the current epoch, and go on to the next."""
        indices = iter(list(super().__iter__()))
        self.set_epoch(self.epoch + 1)
        return indices
