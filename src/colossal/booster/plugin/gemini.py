"""Data parallelism in which ranks divide parameters, gradients and optimizer states among themselves, by chunks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from colossal.amp import DynamicScaler
from colossal.amp.half import cast_floats, run_in
from colossal.booster.boosted import Boosted, Capabilities, Parts, reduce_in_each_pass
from colossal.booster.mixed_precision import MixedPrecision
from colossal.booster.plugin.data_parallel import DataParallelPlugin
from colossal.booster.plugin.device import check_device
from colossal.booster.plugin.gemini_options import GeminiOptions, sort_options
from colossal.booster.plugin.replicas import BuffersOfFirstRank
from colossal.booster.plugin.zero_options import chosen_precision
from colossal.cluster import current_mesh
from colossal.interface import ModelWrapper, OptimizerWrapper


@final
class GeminiPlugin(DataParallelPlugin):
    """Shares parameters, gradients and optimizer states among the data-parallel ranks: ZeRO-3, by chunks.

    For models that do not fit on one device. Parameters lie one behind the other in chunks, of which each rank has a
    share. A chunk is gathered when an operation reads one of its parameters, and released when its memory is needed for
    others; so no structure of the model is assumed. What a share consists of can be on the device or in the memory of
    the host, by fixed fractions or by what is left of a budget. A step equals one of a single process on the joined
    batch of all ranks.

    The optimizer that is passed to boost updates ranges of flattened parameters, as under `LowLevelZeroPlugin`: any of
    `torch.optim` that treats elements one by one, and those of `colossal.nn.optimizer`. Models that were built inside
    of `colossal.lazy.LazyInitContext` get their values parameter by parameter, so that no rank ever has the whole.

    Between passes parameters have no values: only forward and backward passes through the boosted model read them, and
    `Booster.save_model` saves them. The boosted model has its chunks as ``model.chunks``. All ranks must use the same
    parameters in the same order.

    Args:
        chunk_config_dict: For numbers of ranks, ``{"chunk_size": elements, "keep_gathered": bool}``; by default the
            size is searched for.
        chunk_init_device: Accepted for None and the boosting device: parameters are cut one by one, so none is in need
            of another place.
        placement_policy: ``"static"``: as the shares below say; ``"auto"``: on the device as long as they fit.
        enable_gradient_accumulation: Gradients of several backward passes add up, with and without it.
        max_prefetch: How many chunks are gathered ahead of their use, from the second pass on.
        shard_param_frac: Static: the share of the parameters that ranks divide among themselves; the rest is whole.
        offload_optim_frac: Static: the share of masters, gradients and optimizer states that is in host memory.
        offload_param_frac: Static: the share of the parameters that is in host memory between its uses.
        warmup_non_model_data_ratio: Auto: the share of the budget that the first pass keeps free.
        steady_cuda_cap_ratio: Auto: the share of a GPU's memory that is the budget, if `device_budget` is not given.
        precision: ``"fp16"``, ``"bf16"``, or ``"fp32"`` for the dtype that the model has.
        master_weights: Update float32 masters; otherwise bf16 parameters themselves, whose small updates get lost.
        pin_memory: Page-lock the host memory of chunks, from which a GPU copies faster.
        force_outputs_fp32: Cast floating-point outputs to float32, also if nothing else is cast.
        strict_ddp_mode: Keep all parameters whole on all ranks.
        search_range_m: How far above the smallest chunk the size is searched for, in units of 2**20 elements.
        hidden_dim: The step of that search, in elements; 1024 by default.
        min_chunk_size_m: The smallest chunk, in units of 2**20 elements.
        memstats: Knows the order in which parameters are used, as ``param_order``.
        gpu_margin_mem_ratio: Accepted for 0 only: under the auto policy the optimizer is in host memory.
        initial_scale: First loss scale in fp16; greater than 0.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after overflows; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        max_norm: Clip the common norm of the gradients to it before each step; 0 does not.
        norm_type: The p of that norm.
        tp_size: Number of ranks that share each layer; only 1 is built.
        extra_dp_size: Number of replicas of the shards: each block of neighbours on the dp axis shares the chunks among
            its ranks, and there are so many blocks.
        enable_all_optimization: All of the next five; not built yet.
        enable_fused_normalization: Not built yet.
        enable_flash_attention: Not built yet.
        enable_sequence_parallelism: Not built yet.
        enable_jit_fused: Not built yet.
        enable_async_reduce: Reduce gradients while the backward pass goes on.
        use_fp8: Matrix products in 8 bits; not built yet.
        verbose: Log the chunk configuration, and each change of the loss scale, on rank 0.
        fp8_communication: Communicate in 8 bits; not built yet.
        device_budget: The most bytes on the device, for parameters, gradients, optimizer states, and with the auto
            policy for what autograd saves; on a CPU too, beside whose memory that of the host then is another tier.
        scatter_after_inference: Release all chunks after a forward pass without gradients.
        nvme_param_frac: Static: the share of the parameters that is in files between its uses; within the share that is
            off the device. The states of `colossal.nn.optimizer.HybridAdam` go there by its own arguments.
        nvme_offload_dir: The folder of these files, on a fast disk; that of temporary files by default.

    Raises:
        ConfigError: A value is outside its range, or contradicts another.
        UnsupportedError: An option is not built yet; the message names the nearest that works.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
    https://arxiv.org/abs/1910.02054, section 5.3; Fang et al., "Parallel Training of Pre-Trained Models via Chunk-Based
    Dynamic Memory Management", 2021, https://arxiv.org/abs/2108.05818.

    Communication: all_gather, dp, the parameters' bytes, in each forward pass, and in each backward pass for the chunks
    that are not whole any more; reduce_scatter, dp, the gradients' bytes, in each backward pass; all_reduce, dp, 4
    bytes for each parameter and 16 more, in each step.

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
        Parameter of (3, 4) in torch.bfloat16 on cpu, whose values lie in a chunk [(torch.float32, torch.Size([6]))]
    """

    supported_devices = ("cpu", "cuda")
    supported_axes = ("dp", "tp")
    supported_precisions = ("fp16", "bf16", "fp32")

    def __init__(
        self,
        chunk_config_dict: Mapping[int, Mapping[str, Any]] | None = None,
        chunk_init_device: torch.device | str | None = None,
        placement_policy: str = "static",
        enable_gradient_accumulation: bool = False,
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        precision: str = "fp16",
        master_weights: bool = True,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_m: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        memstats: Any = None,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_size: int = 1,
        extra_dp_size: int = 1,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_sequence_parallelism: bool = False,
        enable_jit_fused: bool = False,
        enable_async_reduce: bool = True,
        use_fp8: bool = False,
        verbose: bool = False,
        fp8_communication: bool = False,
        device_budget: int | None = None,
        scatter_after_inference: bool = True,
        nvme_param_frac: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        said = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self._scaler, self._options = sort_options(said)

    def configure(
        self,
        parts: Parts,
        device: torch.device,
        precision: MixedPrecision | None = None,
    ) -> Boosted:
        """Put the parts of a training program together.

        Args:
            parts: As the user built them; the model's parameters move into chunks.
            device: Where the model computes.
            precision: Instead of the plugin's own, if that is its default.

        Returns:
            The parts, the optimizer updating shards.

        Raises:
            MeshError: There is no world yet, or the replicas do not divide it.
            ConfigError: The world was launched for another device, the ranks have different models, or the budget is
                too small.
            UnsupportedError: The model or the optimizer can not be trained in chunks.

        Communication: broadcast, dp, the model's bytes: all ranks start from rank 0's.
        """
        from colossal.zero.gemini import ChunkManager
        from colossal.zero.gemini.build import build_chunks, check_init_device

        mesh, own, model = current_mesh(), self._options, parts.model
        options = replace(own, precision=chosen_precision(own.precision, precision, "GeminiPlugin"))
        check_device(device, mesh)
        check_init_device(options.chunk_init_device, device)
        chunks: ChunkManager = build_chunks(
            model,
            options.partition(mesh),
            options.chunks,
            options.gradients,
            device,
            options.dtype,
            options.memstats,
            options.scatter_after_inference,
        )
        optimizer = None if parts.optimizer is None else self._shard(model, parts.optimizer, options, chunks)
        BuffersOfFirstRank(model, mesh)
        wrapper = ModelWrapper(model, chunks.forward_pass)
        wrapper.__dict__["chunks"] = chunks
        if options.dtype is not None:
            run_in(wrapper, options.dtype)
        elif options.force_outputs_fp32:
            wrapper.register_forward_hook(lambda _module, _args, outputs: cast_floats(outputs, torch.float32))
        boosted = Boosted(wrapper, optimizer, parts.criterion, parts.dataloader, parts.lr_scheduler)
        return replace(boosted, capabilities=Capabilities(no_sync=reduce_in_each_pass))

    def _shard(
        self, model: nn.Module, optimizer: Optimizer, options: GeminiOptions, chunks: Any
    ) -> OptimizerWrapper:
        from colossal.zero.gemini.optimizer import shard_over_chunks

        scaled = options.dtype == torch.float16
        return shard_over_chunks(
            optimizer,
            chunks,
            options.gradients,
            {parameter: name for name, parameter in model.named_parameters()},
            DynamicScaler(self._scaler, chunks.memory.device.type, verbose=options.verbose) if scaled else None,
            options.max_norm,
            options.norm_type,
        )
