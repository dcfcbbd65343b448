"""Fully sharded data parallelism: each rank keeps a shard of every parameter, gradient and optimizer state."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin.base import wrap_parts
from colossal._src.booster.plugin.data_parallel import DataParallelPlugin, check_device
from colossal._src.booster.plugin.fsdp.fsdp_model_checks import check_values
from colossal._src.booster.plugin.fsdp.fsdp_options import parse_fsdp_options
from colossal._src.booster.plugin.fsdp.fsdp_pass_checks import explain_backward_error
from colossal._src.booster.plugin.fsdp.fsdp_sharder import FSDPSharder
from colossal._src.cluster import current_mesh
from colossal._src.interface import Boosted, Capabilities, Parts
from colossal._src.tensor import DATA

if TYPE_CHECKING:
    from torch.distributed import fsdp


@final
class TorchFSDPPlugin(DataParallelPlugin):
    """Shards parameters, gradients and optimizer state over the data-parallel ranks by torch's `fully_shard` (FSDP2).

    For models that do not fit on one device together with gradients and optimizer state. The keywords are those of
    FSDP1; each is translated to FSDP2, and what FSDP2 has no option for is rejected. A step equals one of a single
    process on the joined batch of all ranks.

    Parameters that are gathered and freed together are a unit: each block of the model, and the model for the rest.
    Outside of a forward or backward pass `model.parameters()` and their gradients are DTensors, of which this rank
    holds a shard: `.to_local()` returns it, `.full_tensor()`, called on all ranks, the full tensor. What a program does
    with parameters there, on all ranks, is as with full ones: norms and numbers are those of the full tensor, random
    values are drawn as for it, and full tensors may be written into it. The optimizer that is passed to boost updates
    the shards, with its groups and hyperparameters as they were. All ranks run the same forward passes, evaluation
    included, and call the same units in one order, which is checked whenever it changes. Evaluate under
    `torch.no_grad`; `torch.inference_mode` is rejected. After an exception in a pass, `zero_grad` of the optimizer
    discards what it left.

    Buffers stay replicated. Those that checkpoints hold are rank 0's on all ranks before each forward pass, as under
    `TorchDDPPlugin`. So do parameters without dimensions, whose gradients are averaged. Inside of `no_sync` each rank
    holds full gradients. Under a precision of the Booster, autocast keeps 16-bit copies of the weights from forward
    to backward pass; `mixed_precision` of this plugin frees and gathers them in 16 bits instead.

    Args:
        process_group: The ranks to shard over: None or the group of the dp axis. For hybrid sharding a `DeviceMesh`
            of shape (replicas, shards) over these ranks, its dimensions named.
        sharding_strategy: A member of `torch.distributed.fsdp.ShardingStrategy`, or its name. ``FULL_SHARD``, the
            default, frees gathered parameters after a unit's forward pass; ``SHARD_GRAD_OP`` keeps them for the
            backward pass; ``HYBRID_SHARD`` and ``_HYBRID_SHARD_ZERO2`` do the same inside of each replica.
        cpu_offload: True or `CPUOffload(offload_params=True)`: keep the shards in the memory of the GPU's host. Not
            together with a precision of the Booster.
        auto_wrap_policy: What makes a module a unit: one of `torch.distributed.fsdp.wrap`'s policies. By default the
            blocks that a transformers model names, or else the entries of the outermost `ModuleList` objects. A unit
            is gathered when its forward method runs: nothing else may use its parameters.
        backward_prefetch: ``BackwardPrefetch.BACKWARD_PRE`` or None: what FSDP2 does.
        mixed_precision: `torch.distributed.fsdp.MixedPrecisionPolicy`, or FSDP1's `MixedPrecision`: gather parameters
            and reduce gradients in another dtype. Not together with a precision of the Booster.
        ignored_modules: Modules of the model that stay unsharded; their parameters must be frozen.
        param_init_fn: Rejected: build the model inside of `colossal.lazy.LazyInitContext` instead.
        sync_module_states: Start from the parameters, buffers and optimizer state of rank 0; otherwise all ranks must
            have equal ones, which is checked.
        fp8_communication: Reduce-scatter gradients in 8 bits, with a scale for each block of them; sums are in float32,
            and parameters are gathered in their dtype.

    Raises:
        ConfigError: A value is of the wrong kind, or contradicts another.
        UnsupportedError: FSDP2 has no counterpart of an option; the message names the nearest that works.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
    https://arxiv.org/abs/1910.02054; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
    2023, https://arxiv.org/abs/2304.11277.

    Communication: all_gather, dp, the parameters' bytes, in each forward pass, and in each backward pass unless the
    strategy keeps them; reduce_scatter, dp, the gradients' bytes, in each backward pass outside of `no_sync`.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.booster.plugin import TorchFSDPPlugin
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     booster = Booster(device="cpu", plugin=TorchFSDPPlugin())
        ...     model, *_ = booster.boost(torch.nn.Linear(2, 4))
        ...     weight = model.unwrap().weight
        ...     print(weight.shape, weight.to_local().shape)
        torch.Size([4, 2]) torch.Size([2, 2])
    """

    supported_axes = (DATA,)
    supported_precisions = ("fp16", "bf16", "fp8", "fp32")

    def __init__(
        self,
        process_group: ProcessGroup | DeviceMesh | None = None,
        sharding_strategy: "fsdp.ShardingStrategy | str | None" = None,
        cpu_offload: "fsdp.CPUOffload | bool | None" = None,
        auto_wrap_policy: Callable[..., bool] | Any | None = None,
        backward_prefetch: "fsdp.BackwardPrefetch | None" = None,
        mixed_precision: "fsdp.MixedPrecisionPolicy | fsdp.MixedPrecision | None" = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = False,
        fp8_communication: bool = False,
    ) -> None:
        self._options = parse_fsdp_options(locals())

    def configure(self, parts: Parts, device: torch.device, precision: MixedPrecision | None) -> Boosted:
        """Wrap the parts of a training program for this plugin.

        Args:
            parts: As the user built them; the model's parameters are sharded in place.
            device: Where the model goes.
            precision: What runs in half precision; nothing by default.

        Returns:
            The parts, the model sharded.

        Raises:
            MeshError: No process group is initialized.
            ConfigError: The process group was launched for another device, the ranks start from different values, or
                two options contradict each other.
            UnsupportedError: The device, the model or the optimizer does not work with sharding.

        Communication: broadcast, dp, the model's bytes, with `sync_module_states`; otherwise all_reduce, dp, 32 bytes,
        by which the ranks compare their values, and 16 more if the model was built lazily.
        """
        mesh = current_mesh()
        check_device(device, mesh)
        self._options.check_device(device)
        if precision is not None:
            self._options.check_precision(precision.name)
        check_values(parts.model)
        sharding = FSDPSharder(self._options, mesh)
        boosted = wrap_parts(parts, device, precision, sharding.apply)
        if boosted.optimizer is not None:
            boosted.optimizer.register_zero_grad_hook(sharding.discard)
            boosted.optimizer.register_step_check(sharding.average_assigned)
            boosted.optimizer.register_backward_error_hook(explain_backward_error)
            boosted.optimizer.limit_parameters(boosted.model.parameters())
        return replace(boosted, capabilities=Capabilities(no_sync=sharding.no_sync))

    @property
    def _keeps_full_weights(self) -> bool:
        return False
