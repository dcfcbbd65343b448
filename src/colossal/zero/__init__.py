"""ZeRO: optimizer states, gradients and parameters that are partitioned over data-parallel ranks."""

from colossal._src.zero import (
    zero_model_wrapper,
    zero_optim_wrapper,
)
from colossal.zero import gemini as gemini

__all__ = ["zero_model_wrapper", "zero_optim_wrapper"]
