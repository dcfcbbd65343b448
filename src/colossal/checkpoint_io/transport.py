"""Bringing whole tensors to the rank that writes them."""

import torch

from colossal.checkpoint_io.entries import Entry
from colossal.checkpoint_io.snapshot import boxes_on_host
from colossal.checkpoint_io.writers import Writers
from colossal.tensor import BoxLayout, Region, parts_of, whole_of


def whole_on_first(entry: Entry, writers: Writers) -> torch.Tensor | None:
    """Put a tensor together on the rank that writes; all ranks call together.

    Communication: that of `colossal.tensor.whole_of`; if only some ranks have a part, gather_object, the writers, the
    bytes of the tensor.
    """
    if not isinstance(entry.layout, BoxLayout):
        return whole_of(entry.value).detach()
    own = _boxes_to_send(entry, entry.layout, writers)
    parts = writers.collect(own)
    if not writers.leads:
        return None
    whole = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    for region, box in (pair for each in parts for pair in each):
        whole[region.slices] = box
    return whole


def _boxes_to_send(entry: Entry, layout: BoxLayout, writers: Writers) -> list[tuple[Region, torch.Tensor]]:
    """Return copies of the boxes that this rank, the first of those that have them, has to send."""
    if entry.value is None:
        return []
    own = dict(parts_of(entry.value, writers.rank))
    chosen = [region for region, ranks in layout.holders.items() if ranks[0] == writers.rank]
    return list(zip(chosen, boxes_on_host([own[region].detach() for region in chosen]), strict=True))
