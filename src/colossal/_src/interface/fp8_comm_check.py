"""Whether gradients that are sent in 8 bits are rounded equally on ranks that hold the same parameter."""

from collections.abc import Iterable

import torch

from colossal._src.tensor import placement_of
from colossal.errors import UnsupportedError


def check_equal_rounding(parameters: Iterable[torch.Tensor], *, has_tied_stages: bool = False) -> None:
    """Reject 8 bits where a replicated parameter would be quantized together with gradients that differ between ranks.

    Each block of a bucket has one scale. Next to shards, which differ between tensor-parallel ranks, the gradient of
    a replicated parameter would be rounded differently on each of them, and its copies would drift apart.
    """
    places = [placement_of(each) for each in parameters if each.requires_grad]
    is_mixed = any(each.is_compute_sharded for each in places) and any(
        not each.is_compute_sharded or each.replica_groups for each in places
    )
    if is_mixed or has_tied_stages:
        what = (
            "tied parameters of several pipeline stages" if has_tied_stages else "shards next to replicated parameters"
        )
        raise UnsupportedError(
            "Gradients in 8 bits are rounded by blocks, equally on ranks that hold the same parameter. "
            f"Found fp8_communication=True with {what}, which would drift apart. Leave fp8_communication out, or train "
            "without tensor parallelism and tied stages."
        )
