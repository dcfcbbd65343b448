"""What the user may say about sharded optimizer states."""

from dataclasses import dataclass
from typing import final

import torch

from colossal.errors import ConfigError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@final
@dataclass(frozen=True)
class ZeroConfig:
    """How gradients are communicated, and where optimizer states are.

    Args:
        stage: 1 keeps full gradients on every rank, so that they can accumulate without communication; 2 keeps of each
            gradient only the shard that this rank updates.
        bucket_numel: Gradients are reduced when this many elements of them are there; a larger one gets its own bucket.
        communication_dtype: The dtype that gradients are summed in; that of the gradients by default.
        overlap_communication: Let the backward pass go on while gradients are reduced.
        overlap_allgather: Let the next forward pass begin while updated parameters still arrive.
        cpu_offload: Keep master weights and optimizer states in host memory.
        master_weights: Update float32 copies of parameters in half precision.
        fp8_communication: Communicate gradients in 8 bits, with a scale for each block of them; sums are in float32.

    Raises:
        ConfigError: A value is outside its range.

    Example:
        >>> from colossal._src.zero import ZeroConfig
        >>> ZeroConfig(stage=2).keeps_gradients
        False
    """

    stage: int = 1
    bucket_numel: int = 12 * 1024 * 1024
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise ConfigError(
                f"Low-level ZeRO shards optimizer states (stage 1), and gradients too (stage 2). Found stage="
                f"{self.stage}. Pass 1 or 2; parameters are sharded by TorchFSDPPlugin."
            )
        if self.bucket_numel < 1:
            raise ConfigError(
                f"Gradients are reduced in buckets of at least one element. Found {self.bucket_numel} elements. "
                "The default of reduce_bucket_size_in_m is 12."
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
