"""Data parallelism that shards parameters, gradients and optimizer states by chunks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, final

import torch

from colossal._src.amp import ScalerConfig
from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin.data_parallel import DataParallelPlugin, check_device
from colossal._src.booster.plugin.replica_sync import broadcast_buffers_before_forward
from colossal._src.booster.plugin.zero_options import ZeroOptions
from colossal._src.cluster import ParallelMesh, ambient_mesh, current_mesh
from colossal._src.interface import (
    Boosted,
    Capabilities,
    Clipping,
    Keywords,
    Parts,
    keywords_for,
    reduce_in_each_pass,
)
from colossal._src.tensor import DATA
from colossal._src.zero import ZeroConfig
from colossal.errors import ConfigError

if TYPE_CHECKING:
    from colossal._src.shardformer import ShardConfig


@final
@dataclass(eq=False, repr=False)
class GeminiPlugin(DataParallelPlugin):
    """Shares parameters, gradients and optimizer states among the data-parallel ranks: ZeRO-3, by chunks.

    For models that do not fit on one device. Parameters are stored one after the other in chunks, of which each rank
    holds a shard. A chunk is gathered when an operation reads one of its parameters, and released when its memory is
    needed for others; so no structure of the model is assumed. The data of a shard can be on the device or in the
    memory of the host, by fixed fractions or by what is left of a budget. A step equals one of a single process on the
    joined batch of all ranks.

    The optimizer that is passed to boost updates ranges of flattened parameters, as under `LowLevelZeroPlugin`: any of
    `torch.optim` that treats elements one by one, and those of `colossal.nn.optimizer`. Models that were built inside
    of `colossal.lazy.LazyInitContext` get their values parameter by parameter, so that no rank ever holds the full
    model.

    Between passes parameters have no values: only forward and backward passes through the boosted model read them, and
    `Booster.save_model` saves them. The boosted model is a `colossal.zero.gemini.GeminiDDP`, whose chunks are
    ``model.chunks``. All ranks must use the same parameters in the same order.

    With a `tp_size` each layer of a Hugging Face model is first sharded over that many ranks, by the table of its
    family (`ShardFormer`), and chunks are sharded over the ranks that have the same shards.

    Args:
        chunk_config_dict: For numbers of ranks, ``{"chunk_size": elements, "keep_gathered": bool}``; by default the
            size is searched for.
        chunk_init_device: Accepted for None and the boosting device: parameters are sharded one by one, so none needs
            another device.
        placement_policy: ``"static"``: as the fractions below say; ``"cuda"``: all on the device; ``"cpu"``,
            ``"const"``: all in host memory, parameters between their uses; ``"auto"``: on the device while it fits.
        enable_gradient_accumulation: Gradients of several backward passes add up, with and without it.
        max_prefetch: How many chunks are gathered ahead of their use, from the second pass on.
        shard_param_frac: Static: the fraction of the parameters that is sharded over ranks; the rest is replicated.
        offload_optim_frac: Static: the fraction of master weights, gradients and optimizer states in host memory.
        offload_param_frac: Static: the fraction of the parameters that is in host memory between its uses.
        warmup_non_model_data_ratio: Auto: the fraction of the budget that the first pass keeps free.
        steady_cuda_cap_ratio: Auto: the fraction of a GPU's memory that is the budget, if `device_budget` is not given.
        precision: ``"fp16"``, ``"bf16"``, or ``"fp32"`` for the dtype that the model has; by default that of the
            Booster, or ``"fp16"`` if it has none either.
        master_weights: Update float32 master weights; otherwise parameters themselves, whose small updates get lost,
            and in fp16 small gradients as well.
        pin_memory: Page-lock the host memory of chunks, from which a GPU copies faster; on a CPU there is nothing to
            page-lock.
        force_outputs_fp32: Cast floating-point outputs to float32, also if nothing else is cast.
        strict_ddp_mode: Keep all parameters unsharded on all ranks, on their devices.
        search_range_m: How far above the smallest chunk the size is searched for, in units of 2**20 elements.
        hidden_dim: The step of that search, in elements; 1024 by default.
        min_chunk_size_m: The smallest chunk, in units of 2**20 elements; none is smaller than the largest parameter.
        memstats: An object that holds the order in which parameters are used, as ``param_order``.
        gpu_margin_mem_ratio: Fulfilled by the static policy with an `offload_optim_frac` of 0, where all of the
            optimizer is on the device; else accepted for 0 only.
        initial_scale: First loss scale in fp16; greater than 0.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after overflows; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        max_norm: Clip the common norm of the gradients to it before each step; 0 does not.
        norm_type: The p of that norm.
        tp_size: Ranks over which each layer of a Hugging Face model is sharded; layers of `colossal.nn` are sharded by
            the mesh in force, without it.
        extra_dp_size: Number of replicas of the shards: each block of consecutive ranks on the dp axis shards the
            chunks over its ranks, and there are so many blocks.
        enable_all_optimization: The three options below that make a model faster, as far as it supports them; the log
            says which.
        enable_fused_normalization: Compute norms in one kernel; see `colossal.shardformer.ShardConfig` for this option
            and the next three.
        enable_flash_attention: Compute attention without storing its scores.
        enable_sequence_parallelism: Shard sequences over the ranks of tp between sharded layers, as in the mode
            ``"split_gather"``.
        enable_jit_fused: Compile activations of several operations into one kernel.
        enable_async_reduce: Reduce gradients while the backward pass goes on.
        use_fp8: Matrix products in 8 bits; not built yet.
        verbose: Log the chunk configuration, and each change of the loss scale, on rank 0.
        fp8_communication: Reduce gradients in 8 bits between data-parallel ranks, with a scale for each block of
            them; sums are in float32, and parameters are sent in their dtype.
        device_budget: The most bytes on the device, for parameters, gradients, optimizer states, and with the auto
            policy for what autograd saves; on a CPU too, where host memory then is another tier next to it.
        scatter_after_inference: Release all chunks after a forward pass without gradients.
        nvme_param_frac: Static: the fraction of the parameters that is in files between its uses; within the fraction
            that is off the device. The states of `colossal.nn.optimizer.HybridAdam` go there by its own arguments.
        nvme_offload_dir: The folder of these files, on a fast disk; that of temporary files by default.
        device: Where the model computes: the device of the ranks, which is the default.
        search_range_mb: Another name of `search_range_m`, with the same unit: elements, not bytes.
        min_chunk_size_mb: Another name of `min_chunk_size_m`, with the same unit.

    Raises:
        ConfigError: A value is outside its range, or contradicts another.
        UnsupportedError: An option is not built yet; the message names the nearest that works.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
    https://arxiv.org/abs/1910.02054, section 5.3; Fang et al., "Parallel Training of Pre-Trained Models via Chunk-Based
    Dynamic Memory Management", 2021, https://arxiv.org/abs/2108.05818.

    Communication: all_gather, dp, the parameters' bytes, in each forward pass, and in each backward pass for the chunks
    that are no longer gathered; reduce_scatter, dp, the gradients' bytes, in each backward pass; all_reduce, dp, 4
    bytes for each parameter and 16 more, in each step; with a `tp_size` all_reduce, tp, of the input of each sharded
    layer, forward and backward.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.booster.plugin import GeminiPlugin
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     booster = Booster(device="cpu", plugin=GeminiPlugin(precision="bf16"))
        ...     model = torch.nn.Linear(4, 3, bias=False)
        ...     model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        ...     print(model.unwrap().weight, [(each.dtype, each.shape) for each in optimizer.parameters])
        Parameter of (3, 4) in torch.bfloat16 on cpu, whose values are in a chunk [(torch.float32, torch.Size([6]))]
    """

    supported_axes = (DATA, "tp")
    supported_precisions = ("fp16", "bf16", "fp32")
    has_own_precision = True
    _lora_axes = supported_axes

    chunk_config_dict: Mapping[int, Mapping[str, Any]] | None = None
    chunk_init_device: torch.device | str | int | None = None
    placement_policy: str = "static"
    enable_gradient_accumulation: bool = False
    max_prefetch: int = 0
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    precision: str | None = None
    master_weights: bool = True
    pin_memory: bool = False
    force_outputs_fp32: bool = False
    strict_ddp_mode: bool = False
    search_range_m: float = 32
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    memstats: Any = None
    gpu_margin_mem_ratio: float = 0.0
    initial_scale: float = 2.0**16
    min_scale: float | None = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float | None = 2.0**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    tp_size: int = 1
    extra_dp_size: int = 1
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_sequence_parallelism: bool = False
    enable_jit_fused: bool = False
    enable_async_reduce: bool = True
    use_fp8: bool = False
    verbose: bool = False
    fp8_communication: bool = False
    device_budget: int | None = None
    scatter_after_inference: bool = True
    nvme_param_frac: float = 0.0
    nvme_offload_dir: str | None = None
    device: torch.device | str | int | None = None
    search_range_mb: float | None = None
    min_chunk_size_mb: float | None = None
    _zero: ZeroOptions = field(init=False)
    _sharding: "ShardConfig" = field(init=False)
    _own_mesh: ParallelMesh | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.device = None if self.device is None else torch.device(self.device)
        from colossal._src.shardformer import ShardConfig
        from colossal._src.zero.gemini import GeminiConfig

        if self.tp_size < 1:
            raise ConfigError(f"At least one rank has a tensor. Found tp_size={self.tp_size}. Pass 1 or more.")
        # an optimizer that is on the device takes the memory that remains there already
        is_on_device = self.placement_policy == "static" and self.offload_optim_frac == 0
        keywords = Keywords.of(self, ("gpu_margin_mem_ratio",) if is_on_device else ())
        for concern in (ScalerConfig, GeminiConfig):  # passed on by `configure`: here only checked
            keywords.read(concern)
        zero, clipping = keywords.read(ZeroConfig, stage=2), keywords.read(Clipping)
        options = keywords.read(ZeroOptions, plugin="GeminiPlugin", zero=zero, clipping=clipping)
        self._zero = options
        self._sharding = keywords.read(ShardConfig, parallel_output=False)

    @property
    def _shards_model(self) -> bool:
        """Whether `ShardFormer` has something to do: to shard over tp, or to apply an option."""
        options = {each.name for each in fields(self._sharding) if each.name.startswith("enable_")}
        return self.tp_size > 1 or any(
            getattr(self._sharding, name) for name in options - {"enable_tensor_parallelism"}
        )

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh in force if it has `tp_size` tp ranks, or that is 1; else one that is made for it."""
        ambient = ambient_mesh()
        if self.tp_size == 1 or (ambient is not None and ambient.size("tp") == self.tp_size):
            return current_mesh()
        if self._own_mesh is None:
            self._own_mesh = ParallelMesh(tp=self.tp_size)
        assert self._own_mesh is not None
        return self._own_mesh

    def _find_mesh(self) -> ParallelMesh:
        return self.mesh

    @property
    def _keeps_full_weights(self) -> bool:
        return self.tp_size == 1

    def configure(
        self,
        parts: Parts,
        device: torch.device,
        precision: MixedPrecision | None = None,
    ) -> Boosted:
        """Wrap the parts of a training program for this plugin.

        Args:
            parts: As the user built them; the model's parameters move into chunks.
            device: Where the model computes.
            precision: That of the Booster, if the plugin has none of its own.

        Returns:
            The parts, the optimizer updating shards.

        Raises:
            MeshError: No process group is initialized, or `tp_size` or the replicas do not divide its world size.
            ConfigError: The process group was launched for another device, the ranks have different models, or the
                budget is too small.
            PlanError: The plan of the model's family does not fit it, or there is none.
            UnsupportedError: The model or the optimizer cannot be trained in chunks, or does not support an option.

        Communication: broadcast, dp and tp, the model's bytes: all ranks start from rank 0's.
        """
        from colossal._src.zero.gemini import GeminiDDP, GeminiOptimizer

        mesh, options = self.mesh, self._zero.in_precision(precision)
        check_device(device, mesh)
        if self._shards_model:
            from colossal._src.booster.plugin.gemini.gemini_tensor_parallel import shard_model

            shard_model(parts.model, parts.optimizer, replace(self._sharding, mesh=mesh), mesh)
        partition, keywords = options.partitions(mesh).over(), vars(self)
        # `GeminiDDP` trains on the current mesh, which may have other axes
        with mesh:
            model = GeminiDDP(
                parts.model,
                mixed_precision=options.dtype,
                zero_group=partition.group,
                extra_dp_group=partition.replicas,
                **keywords_for(GeminiDDP, keywords),
            )
        optimizer = None
        if parts.optimizer is not None:
            optimizer = GeminiOptimizer(parts.optimizer, model, **keywords_for(GeminiOptimizer, keywords))
        broadcast_buffers_before_forward(parts.model, mesh)
        capabilities = Capabilities(no_sync=reduce_in_each_pass)
        return Boosted(model, optimizer, parts.criterion, parts.dataloader, parts.lr_scheduler, capabilities)
