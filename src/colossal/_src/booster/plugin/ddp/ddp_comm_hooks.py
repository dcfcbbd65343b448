"""What `DistributedDataParallel` sends while a backward pass runs, for those who count."""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import distributed as dist
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from colossal._src.comm import CommCounter, active_counters, all_reduce_fp8, fp8_nbytes
from colossal._src.tensor import DATA


def fp8_allreduce_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over a group, in 8 bits: a communication hook of `DistributedDataParallel`.

    Communication: as `colossal._src.comm.fp8.all_reduce_fp8`.
    """
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(all_reduce_fp8(bucket.buffer() / dist.get_world_size(group), group))
    return done


def count_reductions(
    model: DistributedDataParallel, group: dist.ProcessGroup, *, compress_fp8: bool = False
) -> DistributedDataParallel:
    """Count the reductions of a backward pass, which torch runs in C++, in the counters of its forward pass."""
    _ReductionCounter(model, dist.get_world_size(group), compress_fp8)
    return model


def ddp_comm_bytes(parameters: Iterable[torch.Tensor], size: int, *, compress_fp8: bool = False) -> int:
    """Count the bytes that a rank sends in a backward pass."""
    trained = [each for each in parameters if each.requires_grad]
    num_bytes = sum(each.nbytes for each in trained)
    if compress_fp8:
        num_bytes = fp8_nbytes(sum(each.numel() for each in trained))
    return 2 * num_bytes * (size - 1) // size


@final
class _ReductionCounter:
    """Watches the forward passes of a model."""

    def __init__(self, model: DistributedDataParallel, size: int, compress_fp8: bool) -> None:
        named: Any = model.module.named_parameters()
        left_out: Any = model.parameters_to_ignore  # to others, as experts are
        self._parameters = [each for name, each in named if each.requires_grad and name not in left_out]
        self._size, self._compress_fp8, self._handle = size, compress_fp8, None
        model.register_forward_pre_hook(self._before)

    def _before(self, model: torch.nn.Module, _args: object) -> None:
        counters = active_counters()
        if self._handle is not None:  # a forward pass without a backward pass
            self._handle.remove()
            self._handle = None
        if counters and torch.is_grad_enabled() and getattr(model, "require_backward_grad_sync", False):
            watch = lambda _grad: self._count(counters)  # noqa: E731
            # any: counts once for each backward pass, also if some parameters get no gradient
            self._handle: RemovableHandle | None = register_multi_grad_hook(self._parameters, watch, mode="any")

    def _count(self, counters: tuple[CommCounter, ...]) -> None:
        for counter in counters:
            num_bytes = ddp_comm_bytes(self._parameters, self._size, compress_fp8=self._compress_fp8)
            counter.add("all_reduce", DATA, num_bytes)
        assert self._handle is not None
        self._handle.remove()
        self._handle = None
