"""What forward passes write into parameters, where these are gathered copies that are freed afterwards."""

from collections.abc import Sequence
from typing import NoReturn

import torch

from colossal._src.comm import end_graphs_in
from colossal.errors import UnsupportedError

# By bytes. Larger elements are several words: of the product of a weight with one of 64 bits that ends in zeros,
# as that of 2.0 does, few bits would be left.
_WORDS = {1: torch.int8, 2: torch.int16}
_BLOCK = 1 << 20  # words; what is computed of one is the only memory that a digest takes
_ODD = -7046029254386353131  # 2**64 divided by the golden ratio, as an int64: its multiples spread over all bits

end_graphs_in(__name__)  # a compiled model gathers its parameters, and writes into them, between its graphs


def is_watched(number: int) -> bool:
    """Whether a pass is compared with what was before it: 1, 2, 4, 8 and so on, as writes may begin after a while."""
    return number & (number - 1) == 0


def digests_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Hash the elements of each tensor and their order where it is, so that no device has to be waited for."""
    return torch.stack([_digest(each) for each in values])


def _digest(value: torch.Tensor) -> torch.Tensor:
    words = value.detach().contiguous().reshape(-1).view(_WORDS.get(value.element_size(), torch.int32))
    weights = torch.arange(1, min(words.numel(), _BLOCK) + 1, device=words.device) * _ODD
    weights = (weights ^ (weights >> 32)) * _ODD | 1  # no arithmetic sequence, in which exchanges could cancel
    total = weights.new_zeros(())
    for block in words.split(_BLOCK):
        total = total * _ODD + (block * weights[: block.numel()]).sum()
    return total


def refuse_lost_writes(name: str, gatherer: str, remedy: str) -> NoReturn:
    """Say that what a pass wrote into a parameter will not be there in the next one."""
    raise UnsupportedError(
        f"{gatherer} frees the full parameters after a forward pass, with what the pass wrote into them. Found that a "
        f"pass wrote {name}, as the moving average of an encoder does, or values that are initialized from the first "
        f"batch. {remedy}"
    )
