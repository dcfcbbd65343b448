"""What the first forward pass writes into parameters, where these are gathered copies that are freed afterwards."""

from collections.abc import Sequence
from typing import NoReturn

import torch

from colossal.errors import UnsupportedError


def digests_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum up the bytes of each tensor where it is, so that no device has to be waited for."""
    sums = [each.detach().contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64) for each in values]
    return torch.stack(sums)


def refuse_lost_writes(name: str, gatherer: str, remedy: str) -> NoReturn:
    """Say that what a pass wrote into a parameter will not be there in the next one."""
    raise UnsupportedError(
        f"{gatherer} frees the full parameters after a forward pass, with what the pass wrote into them. Found that a "
        f"pass wrote {name}, as the moving average of an encoder does, or values that are initialized from the first "
        f"batch. {remedy}"
    )
