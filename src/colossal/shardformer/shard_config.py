"""What the user says about dividing a model."""

from dataclasses import dataclass
from typing import final

from colossal.cluster import ParallelMesh


@final
@dataclass(frozen=True)
class ShardConfig:
    """How a model is divided.

    Args:
        mesh: The mesh whose tp axis divides it; the ambient one by default.
        enable_tensor_parallelism: Whether the tp axis divides the model; otherwise it stays as it is.
        parallel_output: Leave the logits of a causal language model divided by vocabulary, and compute its loss from
            that; others put them together.

    Example:
        >>> from colossal.shardformer import ShardConfig
        >>> ShardConfig().parallel_output
        True
    """

    mesh: ParallelMesh | None = None
    enable_tensor_parallelism: bool = True
    parallel_output: bool = True
