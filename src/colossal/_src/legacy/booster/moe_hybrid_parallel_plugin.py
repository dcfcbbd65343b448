"""The older plugin for mixtures of experts, which `HybridParallelPlugin` trains too."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from colossal._src.booster.plugin import HybridParallelPlugin
from colossal._src.legacy.notice import superseded
from colossal._src.pipeline import Action, PipelineStyle, ScheduleNode
from colossal._src.shardformer import GradientCheckpointConfig, PipelineGradientCheckpointConfig, PlanMaker
from colossal._src.tensor import ParallelPlan
from colossal.errors import UnsupportedError

_NOT_OF_HYBRID = ("self", "__class__", "moe_dp_outside", "enable_sequence_overlap")


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """`HybridParallelPlugin` with `ep_size`, under the name and with the arguments that the older documentation has.

    Args:
        tp_size: Ranks over which a tensor is sharded.
        pp_size: Ranks over which the layers are split into stages.
        ep_size: Ranks over which the experts of a layer are sharded.
        sp_size: As of `HybridParallelPlugin`.
        precision: As of `HybridParallelPlugin`.
        zero_stage: As of `HybridParallelPlugin`.
        enable_all_optimization: As of `HybridParallelPlugin`.
        enable_fused_normalization: As of `HybridParallelPlugin`.
        enable_flash_attention: As of `HybridParallelPlugin`.
        enable_jit_fused: As of `HybridParallelPlugin`.
        enable_sequence_parallelism: As of `HybridParallelPlugin`.
        sequence_parallelism_mode: As of `HybridParallelPlugin`.
        enable_sequence_overlap: Let communication of the sequence-parallel linear layers overlap with computation: only
            in the mode ring, which always does.
        parallel_output: As of `HybridParallelPlugin`.
        num_microbatches: As of `HybridParallelPlugin`.
        microbatch_size: As of `HybridParallelPlugin`.
        initial_scale: As of `HybridParallelPlugin`.
        min_scale: As of `HybridParallelPlugin`.
        growth_factor: As of `HybridParallelPlugin`.
        backoff_factor: As of `HybridParallelPlugin`.
        growth_interval: As of `HybridParallelPlugin`.
        hysteresis: As of `HybridParallelPlugin`.
        max_scale: As of `HybridParallelPlugin`.
        max_norm: As of `HybridParallelPlugin`.
        broadcast_buffers: As of `HybridParallelPlugin`.
        ddp_bucket_cap_mb: As of `HybridParallelPlugin`.
        find_unused_parameters: As of `HybridParallelPlugin`.
        check_reduction: As of `HybridParallelPlugin`.
        gradient_as_bucket_view: As of `HybridParallelPlugin`.
        static_graph: As of `HybridParallelPlugin`.
        zero_bucket_size_in_m: As of `HybridParallelPlugin`.
        cpu_offload: As of `HybridParallelPlugin`.
        communication_dtype: As of `HybridParallelPlugin`.
        overlap_communication: With ZeRO: reduce gradients while the backward pass goes on; here False by default.
        custom_policy: As of `HybridParallelPlugin`.
        pp_style: As of `HybridParallelPlugin`.
        num_model_chunks: As of `HybridParallelPlugin`.
        scheduler_nodes: As of `HybridParallelPlugin`.
        num_layers_per_stage: As of `HybridParallelPlugin`.
        gradient_checkpoint_config: As of `HybridParallelPlugin`.
        enable_metadata_cache: As of `HybridParallelPlugin`.
        make_vocab_size_divisible_by: As of `HybridParallelPlugin`.
        moe_dp_outside: Only True: the ranks of an expert-parallel group have consecutive numbers.
        overlap_p2p: As of `HybridParallelPlugin`.
        overlap_allgather: As of `HybridParallelPlugin`.
        fp8_communication: As of `HybridParallelPlugin`.
        use_fp8: As of `HybridParallelPlugin`.
        inner_ring_size: As of `HybridParallelPlugin`.
        dp_outside: Number the ranks of one replica one after the other.
        expert_exchange: As of `HybridParallelPlugin`.

    Raises:
        UnsupportedError: `moe_dp_outside` is False, or `enable_sequence_overlap` True in another mode than ring.
        ConfigError: As of `HybridParallelPlugin`.

    Example:
        >>> from colossal.legacy.booster import MoeHybridParallelPlugin
        >>> from colossal.testing import fake_world
        >>> with fake_world(4):
        ...     plugin = MoeHybridParallelPlugin(tp_size=1, pp_size=1, ep_size=2, zero_stage=1)
        ...     print(plugin.ep_size, plugin.dp_size, plugin.moe_dp_size)
        2 4 2
    """

    def __init__(
        self,
        tp_size: int,
        pp_size: int,
        ep_size: int,
        sp_size: int | None = None,
        precision: str | None = None,
        zero_stage: int = 0,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_jit_fused: bool = False,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
        enable_sequence_overlap: bool = False,
        parallel_output: bool = True,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        initial_scale: float = 2.0**16,
        min_scale: float | None = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float | None = 2.0**32,
        max_norm: float = 0.0,
        broadcast_buffers: bool = True,
        ddp_bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        zero_bucket_size_in_m: float = 12,
        cpu_offload: bool = False,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        custom_policy: ParallelPlan | PlanMaker | None = None,
        pp_style: PipelineStyle = "1f1b",
        num_model_chunks: int = 1,
        scheduler_nodes: Sequence[Sequence[ScheduleNode | Action]] | None = None,
        num_layers_per_stage: Sequence[int | range] | None = None,
        gradient_checkpoint_config: GradientCheckpointConfig | PipelineGradientCheckpointConfig | None = None,
        enable_metadata_cache: bool = True,
        make_vocab_size_divisible_by: int = 64,
        moe_dp_outside: bool = True,
        overlap_p2p: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        inner_ring_size: int | None = None,
        dp_outside: bool = True,
        expert_exchange: Literal["all_to_all", "all_gather"] | None = None,
    ) -> None:
        if not moe_dp_outside:
            raise UnsupportedError(
                "Experts are sharded over consecutive ranks, so that their tokens stay within a host if they can. "
                "Found moe_dp_outside=False. Leave it out."
            )
        if enable_sequence_overlap and not (enable_sequence_parallelism and sequence_parallelism_mode == "ring"):
            raise UnsupportedError(
                "Communication of sequence-parallel linear layers overlaps with computation in the mode 'ring'. Found "
                f"enable_sequence_overlap=True with enable_sequence_parallelism={enable_sequence_parallelism} and "
                f"sequence_parallelism_mode={sequence_parallelism_mode!r}. Pass True and 'ring', or leave it out."
            )
        superseded("colossal.booster.plugin.MoeHybridParallelPlugin", "HybridParallelPlugin(..., ep_size=...)")
        super().__init__(**{name: value for name, value in locals().items() if name not in _NOT_OF_HYBRID})

    @property
    def ep_group(self) -> ProcessGroup:
        """The ranks that have different experts."""
        return self.mesh.group("ep")

    @property
    def moe_dp_group(self) -> ProcessGroup:
        """The ranks that have the same experts."""
        return self.mesh.group("edp")

    @property
    def moe_dp_size(self) -> int:
        """The number of ranks that have the same experts."""
        return self.mesh.size("edp")
