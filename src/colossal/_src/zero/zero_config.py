"""What the user may say about sharded optimizer states."""

from dataclasses import dataclass
from typing import final

import torch

from colossal.errors import ConfigError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@final
@dataclass(frozen=True)
class ZeroConfig:
    """How gradients are communicated, and where optimizer states are."""

    # 1 keeps full gradients on every rank, so that they can accumulate without communication; 2 keeps of each gradient
    # only the shard that this rank updates
    stage: int = 1
    # gradients are reduced when this many elements of them are there; a larger one gets its own bucket
    bucket_numel: int = 12 * 1024 * 1024
    # the dtype that gradients are summed in; that of the gradients by default
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True  # let the backward pass go on while gradients are reduced
    overlap_allgather: bool = False  # let the next forward pass begin while updated parameters still arrive
    cpu_offload: bool = False  # keep master weights and optimizer states in host memory
    master_weights: bool = True  # update float32 copies of parameters in half precision
    # communicate gradients in 8 bits, with a scale for each block of them; sums are in float32
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise ConfigError(
                f"Low-level ZeRO shards optimizer states (stage 1), and gradients too (stage 2). Found stage="
                f"{self.stage}. Pass 1 or 2; to shard parameters too, use GeminiPlugin, TorchFSDPPlugin or "
                "zero_model_wrapper(model, zero_stage=3)."
            )
        if self.bucket_numel < 1:
            raise ConfigError(
                f"Gradients are reduced in buckets of at least one element. Found {self.bucket_numel} elements. "
                "Pass a larger bucket size; the default is 12 * 2**20 elements."
            )
        if self.communication_dtype not in (None, *_FLOATS):
            raise ConfigError(
                "Gradients are summed in a floating-point dtype. Found "
                f"communication_dtype={self.communication_dtype}. Pass one of {', '.join(map(str, _FLOATS))}, or None "
                "for that of the gradients."
            )
        if self.fp8_communication and self.communication_dtype is not None:
            raise ConfigError(
                "Gradients travel in one dtype. Found communication_dtype="
                f"{self.communication_dtype} and fp8_communication=True. Leave one of them out."
            )

    @property
    def keeps_gradients(self) -> bool:
        """Whether every rank keeps full gradients until the step."""
        return self.stage == 1
