"""Whether gradients that travel in 8 bits are rounded alike where ranks hold the same parameter."""

from collections.abc import Iterable

import torch

from colossal.errors import UnsupportedError
from colossal.tensor import placement_of


def check_equal_rounding(parameters: Iterable[torch.Tensor], *, has_tied_stages: bool = False) -> None:
    """Refuse 8 bits where a parameter of several ranks shares its scales with gradients that differ between them.

    A scale is that of a block of a bucket. Next to shards, which differ between tensor-parallel ranks, the gradient of
    a replicated parameter would be rounded in another way on each of them, and the parameter would drift apart.
    """
    places = [placement_of(each) for each in parameters if each.requires_grad]
    is_mixed = any(each.is_compute_sharded for each in places) and any(
        not each.is_compute_sharded or each.replica_groups for each in places
    )
    if is_mixed or has_tied_stages:
        what = (
            "tied parameters of several pipeline stages" if has_tied_stages else "shards beside replicated parameters"
        )
        raise UnsupportedError(
            "Gradients in 8 bits are rounded by blocks, alike where ranks hold the same parameter. "
            f"Found fp8_communication=True with {what}, which would drift apart. Leave fp8_communication out, or train "
            "without tensor parallelism and tied stages."
        )
