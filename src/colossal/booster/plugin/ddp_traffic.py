"""What `DistributedDataParallel` sends while a backward pass runs, for those who count."""

from collections.abc import Iterable
from typing import final

import torch
from torch import distributed as dist
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from colossal.comm import CommCounter, active_counters


def count_reductions(model: DistributedDataParallel, group: dist.ProcessGroup) -> DistributedDataParallel:
    """Let counters that are open in a forward pass count what its backward pass reduces, which torch does in C++.

    Args:
        model: The model; it costs nothing where no counter is open.
        group: The ranks of the dp axis.

    Returns:
        The model.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.booster.plugin import TorchDDPPlugin
        >>> from colossal.comm import CommCounter
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     model, *_ = Booster(device="cpu", plugin=TorchDDPPlugin()).boost(torch.nn.Linear(2, 1))
        ...     with CommCounter() as counter:
        ...         model(torch.ones(3, 2)).sum().backward()
        ...     return counter.bytes["all_reduce", "dp"]
        >>> run_threads(program, 2)  # of 3 float32 numbers
        [12, 12]
    """
    _Reductions(model, dist.get_world_size(group))
    return model


def reduced_bytes(parameters: Iterable[torch.Tensor], size: int) -> int:
    """Tell how much a rank sends in a backward pass.

    Args:
        parameters: Those of the model.
        size: Number of replicas.

    Returns:
        Bytes.

    Example:
        >>> import torch
        >>> from colossal.booster.plugin.ddp_traffic import reduced_bytes
        >>> reduced_bytes(torch.nn.Linear(2, 1).parameters(), size=4)
        18
    """
    return 2 * sum(each.nbytes for each in parameters if each.requires_grad) * (size - 1) // size


@final
class _Reductions:
    """Watches the forward passes of a model."""

    def __init__(self, model: DistributedDataParallel, size: int) -> None:
        self._parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        self._size, self._handle = size, None
        model.register_forward_pre_hook(self._before)

    def _before(self, model: torch.nn.Module, _args: object) -> None:
        counters = active_counters()
        if self._handle is not None:  # a forward pass without a backward pass
            self._handle.remove()
            self._handle = None
        if counters and torch.is_grad_enabled() and getattr(model, "require_backward_grad_sync", False):
            watch = lambda _grad: self._count(counters)  # noqa: E731
            self._handle: RemovableHandle | None = register_multi_grad_hook(self._parameters, watch, mode="any")

    def _count(self, counters: tuple[CommCounter, ...]) -> None:
        for counter in counters:
            counter.add("all_reduce", "dp", reduced_bytes(self._parameters, self._size))
        assert self._handle is not None
        self._handle.remove()
        self._handle = None
