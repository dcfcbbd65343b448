"""Tensor, sequence, pipeline and data parallelism together, with ZeRO inside of the latter."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from colossal._src._cached import cached_by_rank
from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin.data_parallel import DataParallelPlugin, check_device
from colossal._src.booster.plugin.hybrid.hybrid_options import parse_hybrid_options
from colossal._src.cluster import AXES, ParallelMesh
from colossal._src.interface import Boosted, Parts
from colossal._src.pipeline import Action, PipelineStageManager, PipelineStyle, ScheduleNode, StageModules
from colossal._src.shardformer import GradientCheckpointConfig, PipelineGradientCheckpointConfig, PlanMaker, ShardConfig
from colossal._src.tensor import DATA, ParallelPlan


class HybridParallelPlugin(DataParallelPlugin):
    """Shards transformers in four ways at once: tensors, sequences, layers, and batches.

    For models that do not fit on one device, or that train faster when sharded. The layers of a model go to the stages
    of a pipeline, each layer is sharded over tensor-parallel ranks by the table of its family (`ShardFormer`), and the
    replicas of this see different data. The model is built as for one process, the same on all ranks; its forward
    method stays as it is. A step equals one of a single process on the joined batch.

    A model in stages is run by `Booster.execute_pipeline`, which splits the batch by `num_microbatches` or
    `microbatch_size`; data-parallel ranks reduce gradients after the last micro-batch. With one stage it does the same,
    and the model can be called as well.

    Checkpoints are those of one process: full tensors under the names of the full model, of which each rank writes
    and reads what it has; any other plugin and number of ranks can load them. Adapters of `Booster.enable_lora` are
    sharded like the layers that they adapt.

    Args:
        tp_size: Ranks over which a tensor is sharded; these should be consecutive ranks on one host.
        pp_size: Ranks over which the layers are split into stages.
        sp_size: Ranks over which sequences are sharded in the modes all_to_all and ring_attn. With parameters they do
            what data-parallel ranks do: they average gradients, and ZeRO partitions states over them as well. In the
            modes split_gather and ring, sequences are sharded over tp: then it has no effect, and the log says so
            unless it is the same as tp_size.
        precision: ``"fp16"``, ``"bf16"``, or ``"fp32"`` for the dtype that the model has; by default that of the
            Booster, or ``"fp16"`` if it has none either.
        zero_stage: What is partitioned over data-parallel ranks: 0 nothing, 1 optimizer states, 2 gradients too; 2
            without a pipeline only.
        enable_all_optimization: The three options below, as far as the model supports them; the log says which.
        enable_fused_normalization: Compute norms in one kernel; see `ShardConfig` for this option and the next two.
        enable_flash_attention: Compute attention without storing its scores.
        enable_jit_fused: Compile activations of several operations into one kernel.
        enable_sequence_parallelism: Whether sequences are sharded: each batch is the same on these ranks,
            and each rank computes some tokens.
        sequence_parallelism_mode: How: ``"split_gather"`` or ``"ring"`` for the ranks of tp, ``"all_to_all"`` or
            ``"ring_attn"`` for those of sp. By default all_to_all if there are such, else split_gather. Sequences are
            as long as a multiple of the ranks, or for ring_attn of twice as many.
        parallel_output: Leave logits of causal language models sharded, by vocabulary and with sp_size by tokens, and
            compute the loss from that. A loss_function that the program set before boost gets all of them.
        num_microbatches: Number of micro-batches of a batch in a pipeline; or
        microbatch_size: number of samples of each.
        initial_scale: First loss scale in fp16; greater than 0.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after overflows; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        max_norm: Clip the common norm of the gradients, over all axes, to it before each step; 0 does not.
        broadcast_buffers: Give replicas the buffers of the first at each forward pass.
        ddp_bucket_cap_mb: Without ZeRO: size in MB of the buckets in which gradients are reduced.
        find_unused_parameters: Look for parameters that a forward pass did not use; with ZeRO or a pipeline that is
            always done.
        check_reduction: Passed on to torch, which has deprecated it.
        gradient_as_bucket_view: Without ZeRO and pipeline: let gradients share memory with the buckets.
        static_graph: Without ZeRO and pipeline: the graph is the same in every step.
        zero_bucket_size_in_m: With ZeRO: size of a bucket of gradients, in 2**20 elements.
        cpu_offload: With ZeRO: keep master weights and optimizer states in host memory.
        communication_dtype: With ZeRO: the dtype that gradients are summed in; by default that of the parameters.
        overlap_communication: With ZeRO and no pipeline: reduce gradients while the backward pass goes on.
        custom_policy: The plan of the model, or a function that makes it from the model and the mesh; by default that
            of its family.
        pp_style: The schedule: ``"1f1b"``, ``"interleaved"`` or ``"zbv"``.
        num_model_chunks: Stages of each rank: 1 for 1F1B, 2 for zbv, and 2 or more for interleaved.
        scheduler_nodes: Of zbv: the order of passes of each rank, as `colossal.pipeline.zero_bubble_v` makes it or, as
            nodes with `type`, `chunk` and `minibatch`, `colossal.legacy.pipeline.PipelineGraph`; by default the one for
            passes of equal cost.
        num_layers_per_stage: Layers of each stage, over all chunks: numbers, or ranges as `partition_balanced` makes
            them; equal numbers by default.
        gradient_checkpoint_config: A `GradientCheckpointConfig`, or a `PipelineGradientCheckpointConfig` with numbers
            for each stage: how many layers compute their activations again in the backward pass.
        enable_metadata_cache: Send shapes of hidden states only with the first batch of each shape.
        make_vocab_size_divisible_by: Only 64, the default, or 1: nothing is padded, and a vocabulary that the ranks do
            not divide is sharded unevenly, which is exact.
        dp_outside: Number the ranks of one replica one after the other, so that a pipeline stays within a host.
        overlap_p2p: Always True: point-to-point communication of a pipeline overlaps with computation.
        overlap_allgather: With ZeRO and no pipeline: gather updated parameters while the next forward pass goes on.
        fp8_communication: Reduce gradients in 8 bits between data-parallel ranks, with a scale for each block of
            them; sums are in float32, and parameters are sent in their dtype.
        use_fp8: Not built yet.
        inner_ring_size: Of ring_attn: number of ranks of an inner ring, which pass keys and values among themselves
            first.
        ep_size: Ranks over which the experts of a layer are sharded: consecutive ones of a stage, whatever they are on
            dp, sp and tp. It divides the number of experts, and takes no ranks of its own. Experts are not sharded over
            tp then, and the ranks of tp dispatch a part of their tokens each.
        expert_exchange: How tokens come to sharded experts: ``"all_to_all"``, or ``"all_gather"``, which sends less
            where a token goes to more experts than `ep_size`; by default as a layer of the model's own says, else
            all_to_all.

    Raises:
        ConfigError: A value is outside its range, or contradicts another.
        UnsupportedError: An option is not built yet; the message names the nearest that works.

    Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053; Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, https://arxiv.org/abs/2104.04473.

    Communication: in each layer, all_reduce, tp, of its input, forward and backward, or what the mode of sequence
    parallelism has instead; between stages, hidden states and their gradients; and over dp and sp as `TorchDDPPlugin`
    or `LowLevelZeroPlugin` do over dp.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from colossal.booster import Booster
        >>> from colossal.booster.plugin import HybridParallelPlugin
        >>> from colossal.testing import fake_world
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=24, vocab_size=64))
        >>> with fake_world(4):
        ...     booster = Booster(device="cpu", plugin=HybridParallelPlugin(tp_size=2, pp_size=1, precision="bf16"))
        ...     model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        ...     print(model.unwrap().transformer.h[0].mlp.c_fc.weight.shape, booster.plugin.dp_size)
        torch.Size([24, 48]) 2
    """

    supported_axes = AXES
    supported_precisions = ("fp16", "bf16", "fp32")
    has_own_precision = True
    _lora_axes = AXES

    def __init__(
        self,
        tp_size: int,
        pp_size: int,
        sp_size: int | None = None,
        precision: str | None = None,
        zero_stage: int = 0,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_jit_fused: bool = False,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
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
        overlap_communication: bool = True,
        custom_policy: ParallelPlan | PlanMaker | None = None,
        pp_style: PipelineStyle = "1f1b",
        num_model_chunks: int = 1,
        scheduler_nodes: Sequence[Sequence[ScheduleNode | Action]] | None = None,
        num_layers_per_stage: Sequence[int | range] | None = None,
        gradient_checkpoint_config: GradientCheckpointConfig | PipelineGradientCheckpointConfig | None = None,
        enable_metadata_cache: bool = True,
        make_vocab_size_divisible_by: int = 64,
        dp_outside: bool = True,
        overlap_p2p: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        inner_ring_size: int | None = None,
        ep_size: int = 1,
        expert_exchange: Literal["all_to_all", "all_gather"] | None = None,
    ) -> None:
        self._policy = custom_policy
        self._scaler, self._options = parse_hybrid_options(locals())

    @cached_by_rank
    def mesh(self) -> ParallelMesh:
        """The mesh in force if it has the sizes of the constructor, else a new one."""
        return self._options.find_mesh()

    @property
    def tp_size(self) -> int:
        """Ranks that share a tensor."""
        return self.mesh.size("tp")

    @property
    def pp_size(self) -> int:
        """Ranks over which the layers are split into stages."""
        return self.mesh.size("pp")

    @property
    def sp_size(self) -> int:
        """Ranks over which sequences are sharded, in addition to those of tp."""
        return self.mesh.size("sp")

    @property
    def ep_size(self) -> int:
        """Ranks over which the experts of a layer are sharded."""
        return self.mesh.size("ep")

    @property
    def dp_size(self) -> int:
        """Replicas, which see different data."""
        return self.mesh.size(DATA)

    @property
    def zero_stage(self) -> int:
        """What is partitioned over the replicas: nothing (0), optimizer states (1), or gradients as well (2)."""
        return self._options.zero_stage

    @cached_by_rank
    def _replicas(self) -> ParallelMesh:
        """The mesh on whose dp axis are all ranks with the same parameters: those of the sp axis as well."""
        return self.mesh.fold_sp_into_dp()

    @property
    def pg_mesh(self) -> ParallelMesh:
        """Another name of `mesh`."""
        return self.mesh

    @property
    def tp_group(self) -> ProcessGroup:
        """The process group of the ranks that share tensors."""
        return self.mesh.group("tp")

    @property
    def pp_group(self) -> ProcessGroup:
        """The process group of the ranks over which the layers are split."""
        return self.mesh.group("pp")

    @property
    def sp_group(self) -> ProcessGroup:
        """The process group over which sequences are sharded; in split_gather and ring it is that of tp."""
        sharing = self.shard_config.sequence_parallel_config(self.mesh)
        return self.mesh.group("sp" if sharing is None else sharing.sharding.axis)

    @property
    def dp_group(self) -> ProcessGroup:
        """The process group of the replicas that see different data."""
        return self.mesh.group(DATA)

    @property
    def shard_config(self) -> ShardConfig:
        """The options of `ShardFormer`, with the mesh."""
        return self._options.shard_config(self.mesh)

    @property
    def enable_pipeline_parallelism(self) -> bool:
        """Whether the layers are split over several ranks."""
        return self.pp_size > 1

    @property
    def stage_manager(self) -> PipelineStageManager | None:
        """Where this rank is in the pipeline; None without one."""
        return PipelineStageManager(self.mesh, self._options.placement) if self.pp_size > 1 else None

    def _find_mesh(self) -> ParallelMesh:
        return self.mesh

    @property
    def _keeps_full_weights(self) -> bool:
        return self.tp_size == self.pp_size == 1

    def configure(
        self,
        parts: Parts,
        device: torch.device,
        precision: MixedPrecision | None = None,
    ) -> Boosted:
        """Wrap the parts of a training program for this plugin.

        Args:
            parts: As the user built them, the same on all ranks; the model is sharded in place. Or a `StageModules`
                as the model, of the stages that this rank has.
            device: Where the model goes.
            precision: That of the Booster, if the plugin has none of its own.

        Returns:
            The parts: of the model, what this rank has.

        Raises:
            MeshError: No process group is initialized, or the sizes do not fit its world size.
            ConfigError: The process group was launched for another device, or the optimizer has made a step.
            PlanError: The plan does not fit the model.
            UnsupportedError: The model or the optimizer cannot be sharded.

        Communication: broadcast, tp and dp, the bytes of the stages: all ranks start from the values of the first.
        """
        from colossal._src.booster.plugin.hybrid.hybrid_assembly import build, connect

        built = build(self.begin(parts.model, parts.optimizer, device, precision))
        model, capabilities = connect(built)
        return Boosted(model, built.wrapper, parts.criterion, parts.dataloader, parts.lr_scheduler, capabilities)

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        device: torch.device,
        precision: MixedPrecision | None = None,
    ) -> Any:
        """Gather what the pass of `build` begins with.

        Args:
            model: The full model, or the `StageModules` of this rank.
            optimizer: Of its parameters; None to run forward passes only.
            device: Where the model goes; ``meta`` to plan a step.
            precision: That of the Booster, if the plugin has none of its own.

        Returns:
            The assembly of `hybrid_assembly.py`, which is no part of the documented API.

        Raises:
            MeshError: No process group is initialized, or the sizes do not fit its world size.
            ConfigError: The process group was launched for another device.
        """
        from colossal._src.booster.plugin.hybrid.full_training_spec import FullTrainingSpec
        from colossal._src.booster.plugin.hybrid.hybrid_assembly import Assembly
        from colossal._src.booster.plugin.hybrid.stage_sharding import check_stage_modules

        if device.type != "meta":
            check_device(device, self.mesh)
        if isinstance(model, StageModules):
            check_stage_modules(self._policy, self._options, device)
            full_spec = FullTrainingSpec.of_stage_modules(model, optimizer, self._options.placement, self.mesh)
        else:
            full_spec = FullTrainingSpec.of(model, optimizer)
        options = replace(self._options, zero=self._options.zero.in_precision(precision))
        return Assembly(
            model, optimizer, self._policy, options, self._scaler, self.mesh, self._replicas, device, full_spec
        )
