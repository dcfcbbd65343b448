"""What tests of files of tensors share: the engines that this machine allows, and what they write."""

import pytest
import torch

from colossal._src.offload import DirectIO, io_engine
from colossal._src.offload.io_engine import ENGINES, open_io_engine
from colossal.errors import UnsupportedError
from colossal.kernel import huge_zeros

SPAN = io_engine._SPAN
WAYS = (DirectIO(read=False, write=False), DirectIO(read=True, write=True), DirectIO(read=True, write=False))


def allowed(name: str) -> bool:
    try:
        open_io_engine(name).close()
    except UnsupportedError:
        return False
    return True


def engines() -> list:
    """All engines; those that this machine does not allow are skipped."""
    skip = pytest.mark.skip(reason="this machine does not allow the engine")
    return [pytest.param(name, marks=() if allowed(name) else skip) for name in ENGINES]


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    some = torch.randint(0, 256, (min(num_bytes, 10_007),), generator=torch.Generator().manual_seed(seed))
    return some.to(torch.uint8).repeat(num_bytes // 10_007 + 1)[:num_bytes].contiguous()


def aligned(num_bytes: int) -> torch.Tensor:
    return huge_zeros([(num_bytes,)], torch.uint8)[0]
