"""What the user says about dividing a model, and about making it faster."""

from dataclasses import dataclass
from typing import final

from colossal._src.cluster import ParallelMesh
from colossal._src.shardformer.activation_checkpointing import (
    GradientCheckpointConfig,
    PipelineGradientCheckpointConfig,
)
from colossal._src.shardformer.sequence_parallel_config import SequenceMode, SequenceParallelConfig
from colossal.errors import ConfigError


@final
@dataclass(frozen=True)
class ShardConfig:
    """How a model is sharded, and what else is done to it. An option that a model does not support is an error.

    Args:
        mesh: The mesh whose tp axis shards the model; the ambient one by default.
        enable_tensor_parallelism: Whether to shard the model over the tp axis; otherwise it stays replicated.
        parallel_output: Leave the logits of a causal language model sharded over the vocabulary, and compute its loss
            from them; other models gather them. With sequences on the sp axis, tokens stay sharded as well.
        enable_flash_attention: Compute attention without storing its scores, by ``"flash_attention_2"`` where the
            package, the device, the dtype and the classes of the model allow it, and else by ``"sdpa"`` of torch.
        enable_fused_normalization: Compute norms in one kernel; those of torch, such as LayerNorm, are that already.
        enable_jit_fused: Compile activations of several operations, such as GPT-2's GELU, into one kernel. Biases and
            dropout around them are not fused: that would take other forward methods.
        enable_all_optimization: The three options above, as far as the model supports them; a line of the log says
            which, and why others are left out.
        gradient_checkpoint_config: How many layers compute their activations again in the backward pass.
        enable_sequence_parallelism: Whether to shard sequences over ranks.
        sequence_parallelism_mode: How: ``"split_gather"`` or ``"ring"`` for the ranks of the tp axis, ``"all_to_all"``
            or ``"ring_attn"`` for those of the sp axis. The default is all_to_all if that axis has several ranks, else
            split_gather.
        inner_ring_size: Of ring_attn: how many ranks first exchange keys in an inner ring.

    Raises:
        ConfigError: `gradient_checkpoint_config` is something else.

    Example:
        >>> from colossal.shardformer import ShardConfig
        >>> ShardConfig().parallel_output
        True
    """

    mesh: ParallelMesh | None = None
    enable_tensor_parallelism: bool = True
    parallel_output: bool = True
    enable_flash_attention: bool = False
    enable_fused_normalization: bool = False
    enable_jit_fused: bool = False
    enable_all_optimization: bool = False
    gradient_checkpoint_config: GradientCheckpointConfig | PipelineGradientCheckpointConfig | None = None
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: SequenceMode | None = None
    inner_ring_size: int | None = None

    def __post_init__(self) -> None:
        config = self.gradient_checkpoint_config
        if config is not None and not isinstance(config, GradientCheckpointConfig | PipelineGradientCheckpointConfig):
            raise ConfigError(
                "gradient_checkpoint_config is a GradientCheckpointConfig or a PipelineGradientCheckpointConfig. Found "
                f"{config!r}. Pass one of them, such as GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)."
            )

    def sequence_parallel_config(self, mesh: ParallelMesh) -> SequenceParallelConfig | None:
        """Find how sequences are shared on a mesh.

        Args:
            mesh: The mesh.

        Returns:
            The mode and the ranks; None if sequences are not sharded.

        Raises:
            ConfigError: There is no such mode, or its ranks are on the other axis.
        """
        if self.enable_sequence_parallelism:
            return SequenceParallelConfig.of(self.sequence_parallelism_mode, mesh, self.inner_ring_size)
        if self.sequence_parallelism_mode is not None or mesh.size("sp") > 1:
            raise ConfigError(
                "Sequences are sharded where enable_sequence_parallelism=True. Found it False with "
                f"sequence_parallelism_mode={self.sequence_parallelism_mode!r} on {mesh}. Turn it on, or leave both "
                "out."
            )
        return None
