"""Data parallelism: a full model on every rank, gradients averaged while the backward pass runs."""

import inspect
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin.base import wrap_parts
from colossal._src.booster.plugin.data_parallel import DataParallelPlugin, check_device
from colossal._src.booster.plugin.ddp.ddp_comm_hooks import count_reductions, fp8_allreduce_hook
from colossal._src.booster.plugin.ddp.replicated_model import ReplicatedModel
from colossal._src.booster.plugin.replica_sync import HookedAverager
from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.interface import Boosted, Capabilities, Parts, check_equal_rounding, check_equal_writes, unwrap_model
from colossal._src.tensor import DATA, Replicas, broadcast_values, replicas_of
from colossal.errors import ConfigError

# torch 2.13 renamed this keyword, and warns about the old name.
_RENAMED = {"broadcast_buffers": "forward_sync_buffers"}


@dataclass(frozen=True)
class DDPConfig:
    """Options of `DistributedDataParallel`; see `TorchDDPPlugin`."""

    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        if not self.bucket_cap_mb > 0:
            raise ConfigError(
                f"Gradients are reduced in buckets of more than 0 MB. Found bucket_cap_mb={self.bucket_cap_mb}. "
                "The default is 25."
            )

    def keywords(self) -> dict[str, Any]:
        """Return what differs from the defaults, by the keywords of the torch that is installed."""
        known = inspect.signature(DistributedDataParallel).parameters
        renamed = {old: new for old, new in _RENAMED.items() if new in known}
        theirs = [field for field in fields(self) if field.name != "fp8_communication"]
        changed = [field for field in theirs if getattr(self, field.name) != field.default]
        return {renamed.get(field.name, field.name): getattr(self, field.name) for field in changed}

    def replicate(self, model: nn.Module, mesh: ParallelMesh) -> ReplicatedModel:
        """Average the gradients of a model over ranks: `DistributedDataParallel` does where all have the parameter."""
        if mesh.size(DATA) > 1:
            check_equal_writes(unwrap_model(model))
        over_dp, ignored = Replicas(mesh), _find_ignored(model)
        others = [each for each in model.parameters() if each not in ignored and replicas_of(each, mesh) != over_dp]
        left_out = {*ignored, *others}
        if left_out:
            named = (*model.named_parameters(), *model.named_buffers())
            names = [name for name, each in named if each in left_out]
            names += [f".{name}" for name in names if "." not in name]  # as torch calls those of the root, in places
            ddp: Any = DistributedDataParallel
            ddp._set_params_and_buffers_to_ignore_for_model(model, names)  # noqa: SLF001 (torch has no public name for it)
        broadcast_values(others, mesh)
        averager = HookedAverager(others, mesh)
        return ReplicatedModel(model, partial(self._replicate, over_dp.group), averager, left_out)

    def _replicate(self, group: ProcessGroup, model: nn.Module, **options: Any) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, process_group=group, **self.keywords(), **options)
        if self.fp8_communication:
            check_equal_rounding(model.parameters())
            ddp.register_comm_hook(group, fp8_allreduce_hook)
        return count_reductions(ddp, group, compress_fp8=self.fp8_communication)


def _find_ignored(model: nn.Module) -> set[torch.Tensor]:
    """Find what the program keeps from `DistributedDataParallel`, by names of the model before it was wrapped."""
    own = unwrap_model(model)
    names = getattr(own, "_ddp_params_and_buffers_to_ignore", ())
    return {each for name, each in (*own.named_parameters(), *own.named_buffers()) if name in names}


@final
class TorchDDPPlugin(DataParallelPlugin):
    """Trains a replica on every data-parallel rank by `torch.nn.parallel.DistributedDataParallel`.

    For models that fit on one device together with gradients and optimizer state. All ranks hold the same parameters
    at all times; a step equals one of a single process on the joined batch of all ranks.

    Args:
        broadcast_buffers: Give all ranks the buffers of rank 0, such as running means, at each forward pass.
        bucket_cap_mb: Size in MB of the buckets in which gradients are reduced.
        find_unused_parameters: Look for parameters that a forward pass did not use; costs a walk over the graph.
        check_reduction: Passed on to torch, which has deprecated it.
        gradient_as_bucket_view: Let gradients share memory with the buckets: saves one copy of them.
        static_graph: The graph is the same in every step, which allows further savings.
        fp8_communication: Reduce gradients in 8 bits, with a scale for each block of them; sums are in float32.

    Raises:
        ConfigError: `bucket_cap_mb` is not greater than 0.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
    https://arxiv.org/abs/2006.15704.

    Communication: all_reduce, dp, the gradients' bytes, in each backward pass outside of `no_sync`.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.booster.plugin import TorchDDPPlugin
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     booster = Booster(device="cpu", plugin=TorchDDPPlugin(bucket_cap_mb=50))
        ...     model, *_ = booster.boost(torch.nn.Linear(2, 1))
        ...     print(type(model.module).__name__, model(torch.ones(3, 2)).shape)
        DistributedDataParallel torch.Size([3, 1])
    """

    supported_axes = (DATA, "tp")
    supported_precisions = ("fp16", "fp16_apex", "fp16_naive", "bf16", "fp8", "fp32")

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        fp8_communication: bool = False,
    ) -> None:
        self._ddp = DDPConfig(
            broadcast_buffers,
            bucket_cap_mb,
            find_unused_parameters,
            check_reduction,
            gradient_as_bucket_view,
            static_graph,
            fp8_communication,
        )

    def configure(self, parts: Parts, device: torch.device, precision: MixedPrecision | None) -> Boosted:
        """Wrap the parts of a training program for this plugin.

        A model without trainable parameters has no gradients to reduce, and stays as it is until one is thawed.

        Args:
            parts: As the user built them.
            device: Where the model goes.
            precision: What runs in half precision; nothing by default.

        Returns:
            The parts, the model inside of a `DistributedDataParallel`.

        Raises:
            MeshError: No process group is initialized.
            ConfigError: The process group was launched for another device.

        Communication: broadcast, dp, the model's bytes, and those of master weights: all ranks start from the
        parameters of rank 0.
        """
        mesh = current_mesh()
        check_device(device, mesh)
        boosted = wrap_parts(parts, device, precision)
        replicated = self._ddp.replicate(boosted.model, mesh)
        in_model = set(boosted.model.parameters())
        masters = [] if boosted.optimizer is None else [p for p in boosted.optimizer.parameters if p not in in_model]
        # DDP broadcasts the parameters only: the first step would bring the initial values of each rank back
        broadcast_values(masters, mesh)
        accumulates = precision is None or precision.accumulates_locally
        capabilities = Capabilities(no_sync=replicated.no_sync) if accumulates else Capabilities()
        return replace(boosted, model=replicated.wrap(boosted.optimizer), capabilities=capabilities)
