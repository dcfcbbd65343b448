"""Data parallelism in which each rank updates a shard of the parameters: ZeRO-1 and ZeRO-2."""

from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from colossal._src.amp import DynamicScaler, ScalerConfig, cast_inputs_and_outputs, cast_model
from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin.data_parallel import DataParallelPlugin, check_device
from colossal._src.booster.plugin.replica_sync import broadcast_buffers_before_forward
from colossal._src.booster.plugin.wrap_units import find_units
from colossal._src.booster.plugin.zero_options import ZeroOptions
from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.interface import (
    Boosted,
    Capabilities,
    Clipping,
    Keywords,
    ModelWrapper,
    OptimizerWrapper,
    Parts,
    reduce_in_each_pass,
)
from colossal._src.tensor import DATA, broadcast_values, move_module
from colossal._src.zero import ZeroConfig, ZeroShards, shard_optimizer
from colossal.errors import ConfigError


@final
@dataclass(eq=False, repr=False)
class LowLevelZeroPlugin(DataParallelPlugin):
    """Partitions optimizer states, and in stage 2 gradients, over the data-parallel ranks: ZeRO-1 and ZeRO-2.

    For models that fit on one device, but not together with their optimizer states. Every rank has all parameters; it
    updates an equal shard of them and gathers the rest. A step sends as many bytes as one of `TorchDDPPlugin`, and
    equals one of a single process on the joined batch of all ranks.

    The optimizer that is passed to boost updates ranges of flattened parameters: any of `torch.optim` that treats
    elements one by one, and those of `colossal.nn.optimizer`. After a backward pass gradients are in the shards of
    ``optimizer.parameters``, averaged, and a read of `parameter.grad` of the model says so. Parameters that no rank
    used in a step stay as they are, as in a single process.

    In half precision the entire model is cast, as under ``mixed_precision="fp16_naive"``, and the optimizer updates
    float32 master weights of this rank's shard. Buffers that checkpoints hold are rank 0's on all ranks before each
    forward pass.

    Args:
        stage: 1 partitions optimizer states; 2 gradients too, which are reduced in each backward pass.
        precision: ``"fp16"``, ``"bf16"``, or ``"fp32"`` for the dtype that the model has; by default that of the
            Booster, or ``"fp16"`` if it has none either.
        initial_scale: First loss scale in fp16; greater than 0.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after overflows; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        max_norm: Clip the common norm of the gradients to it before each step; 0 does not.
        norm_type: The p of that norm.
        reduce_bucket_size_in_m: Size of a bucket of gradients, in 2**20 elements; may be a fraction.
        communication_dtype: The dtype that gradients are summed in; by default that of the parameters.
        overlap_communication: Reduce gradients while the backward pass goes on.
        overlap_allgather: Gather updated parameters while the next forward pass goes on; each block of the model waits
            for its own. Nothing but a block's own forward pass may use its parameters then.
        cpu_offload: Keep master weights and optimizer states in host memory, and update them there; with
            `colossal.nn.optimizer.HybridAdam` by a fast kernel. On a CPU they are there already.
        master_weights: Update float32 master weights; otherwise parameters themselves, whose small updates get lost,
            and in fp16 small gradients as well.
        verbose: Log each change of the loss scale on rank 0.
        cast_inputs: Cast floating-point inputs of the model to its dtype, and its outputs to float32.
        fp8_communication: Reduce gradients in 8 bits between data-parallel ranks, with a scale for each block of
            them; sums are in float32, and parameters are sent in their dtype.
        use_fp8: Matrix products in 8 bits; not built yet.
        extra_dp_size: Number of replicas of the shards: each block of consecutive ranks on the dp axis partitions the
            states over its ranks, and there are so many blocks.

    Raises:
        ConfigError: A value is outside its range, or contradicts another.
        UnsupportedError: An option is not built yet; the message names the nearest that works.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
    https://arxiv.org/abs/1910.02054.

    Communication: reduce_scatter, dp, the gradients' bytes, in each backward pass outside of `no_sync`; all_gather, dp,
    the parameters' bytes, in each step; all_reduce, dp, 4 bytes for each parameter, in each step.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.booster.plugin import LowLevelZeroPlugin
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(stage=2, precision="bf16"))
        ...     model = torch.nn.Linear(4, 3, bias=False)
        ...     model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        ...     print(model.unwrap().weight.dtype, [(each.dtype, each.shape) for each in optimizer.parameters])
        torch.bfloat16 [(torch.float32, torch.Size([6]))]
    """

    supported_axes = (DATA, "tp")
    supported_precisions = ("fp16", "bf16", "fp32")
    has_own_precision = True

    stage: int = 1
    precision: str | None = None
    initial_scale: float = 2.0**16
    min_scale: float | None = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float | None = 2.0**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    reduce_bucket_size_in_m: float = 12
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    verbose: bool = False
    cast_inputs: bool = True
    fp8_communication: bool = False
    use_fp8: bool = False
    extra_dp_size: int = 1
    _scaler: ScalerConfig = field(init=False)
    _options: ZeroOptions = field(init=False)

    def __post_init__(self) -> None:
        keywords = Keywords.of(self)
        zero, clipping = keywords.read(ZeroConfig), keywords.read(Clipping)
        self._scaler = keywords.read(ScalerConfig)
        options = keywords.read(ZeroOptions, plugin="LowLevelZeroPlugin", zero=zero, clipping=clipping)
        self._options = options

    def configure(
        self,
        parts: Parts,
        device: torch.device,
        precision: MixedPrecision | None = None,
    ) -> Boosted:
        """Wrap the parts of a training program for this plugin.

        Args:
            parts: As the user built them; the model's parameters become views of common buffers.
            device: Where the model goes.
            precision: That of the Booster, if the plugin has none of its own.

        Returns:
            The parts, the optimizer updating shards.

        Raises:
            MeshError: No process group is initialized, or the replicas do not divide its world size.
            ConfigError: The process group was launched for another device.
            UnsupportedError: The model or the optimizer cannot be trained in shards.

        Communication: broadcast, dp, the model's bytes: all ranks start from rank 0's.
        """
        from colossal._src.lazy import materialize

        mesh = current_mesh()
        check_device(device, mesh)
        model = materialize(parts.model)
        options = self._options.in_precision(precision)
        if options.dtype is not None:
            cast_model(model, options.dtype)
        move_module(model, device)
        # before the parameters are sharded: a gather would else join segments of different models
        broadcast_values((*model.parameters(), *model.buffers()), mesh)
        optimizer = None if parts.optimizer is None else self._shard(model, parts.optimizer, options, device, mesh)
        broadcast_buffers_before_forward(model, mesh)
        wrapper = ModelWrapper(model)
        if options.dtype is not None and options.cast_inputs:
            cast_inputs_and_outputs(wrapper, options.dtype)
        if optimizer is None and mesh.size(DATA) > 1:
            wrapper.register_forward_hook(_refuse_backward)
        boosted = Boosted(wrapper, optimizer, parts.criterion, parts.dataloader, parts.lr_scheduler)
        return replace(boosted, capabilities=self._capabilities(optimizer))

    def _shard(
        self, model: nn.Module, optimizer: Optimizer, options: ZeroOptions, device: torch.device, mesh: ParallelMesh
    ) -> OptimizerWrapper:
        scaler = None
        if options.dtype == torch.float16:
            scaler = DynamicScaler(
                self._scaler, device.type, options.verbose, unscale_fp16_grads=not options.zero.master_weights
            )
        return shard_optimizer(
            model,
            optimizer,
            options.partitions(mesh),
            options.zero,
            scaler=scaler,
            clipping=options.clipping,
            units=find_units(model, None, set()) if options.zero.overlap_allgather else (),
        )

    def _capabilities(self, optimizer: OptimizerWrapper | None) -> Capabilities:
        if optimizer is None:
            return Capabilities()
        assert isinstance(optimizer.masters, ZeroShards)
        return Capabilities(optimizer.masters.no_sync if self._options.zero.keeps_gradients else reduce_in_each_pass)


def _refuse_backward(model: nn.Module, _args: object, outputs: object) -> None:
    """Let a backward pass raise an error for parameters whose gradients nothing would reduce."""
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(_refuse)


def _refuse(_grad: torch.Tensor) -> None:
    raise ConfigError(
        "Under LowLevelZeroPlugin the boosted optimizer reduces gradients over ranks. Found a backward pass of a model "
        "that was boosted without one: each rank would train on its own samples. Pass the optimizer to boost: "
        "model, optimizer, *_ = booster.boost(model, optimizer). For a model that is not trained, call "
        "requires_grad_(False)."
    )
