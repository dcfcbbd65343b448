"""Gathers full tensors on the rank that writes them."""

import torch

from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup
from colossal._src.checkpoint_io.entries import Entry
from colossal._src.checkpoint_io.snapshot import copy_regions_to_host
from colossal._src.tensor import Region, RegionLayout, full_tensor_of, local_regions_of


def gather_full_tensor(entry: Entry, writers: CheckpointGroup) -> torch.Tensor | None:
    """Put a tensor together on the rank that writes; all ranks call together.

    Communication: that of `colossal.tensor.full_tensor_of`; if only some ranks have one, gather_object, the writers,
    the bytes of the tensor.
    """
    if not isinstance(entry.layout, RegionLayout):
        return full_tensor_of(entry.value).detach()
    own = _regions_to_send(entry, entry.layout, writers)
    parts = writers.gather_values(own)
    if not writers.is_first_rank:
        return None
    full = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    for region, values in (pair for each in parts for pair in each):
        full[region.slices] = values
    return full


def _regions_to_send(entry: Entry, layout: RegionLayout, writers: CheckpointGroup) -> list[tuple[Region, torch.Tensor]]:
    """Return copies of the regions that this rank sends, the first of the ranks that hold them."""
    if entry.value is None:
        return []
    own = dict(local_regions_of(entry.value, writers.rank))
    chosen = [region for region, ranks in layout.holders.items() if ranks[0] == writers.rank]
    return list(zip(chosen, copy_regions_to_host([own[region].detach() for region in chosen]), strict=True))
