"""The dtypes of 16 bits, in which sums and small updates round away."""

import torch

__all__ = ["HALF_DTYPES"]

HALF_DTYPES = (torch.float16, torch.bfloat16)
