"""Base classes of a program's own wrappers and optimizers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer


class AMPModelMixin:
    """Marks a model whose optimizer keeps master weights; boosted models need no such mark.

    Example:
        >>> import torch
        >>> from colossal.interface import ModelWrapper
        >>> from colossal.legacy.interface import AMPModelMixin
        >>> class HalfModel(ModelWrapper, AMPModelMixin):
        ...     def __init__(self, module):
        ...         super().__init__(module.half())
        >>> HalfModel(torch.nn.Linear(1, 1)).update_master_params() is None
        True
    """

    def update_master_params(self) -> None:
        """Bring the master weights up to date with the model; nothing to do unless a subclass has some."""


class DistributedOptim(ABC, Optimizer):
    """The base of an optimizer whose step needs to know on which ranks its parameters are.

    A program calls `setup_distributed` itself. `HybridParallelPlugin` does that for no optimizer: it takes those of
    `colossal.nn.optimizer` with the same update, and others that update each element by itself.

    Args:
        *args: Those of the optimizer that it is derived from as well.
        **kwargs: Those of the optimizer that it is derived from as well.

    Example:
        >>> import torch
        >>> from colossal.legacy.interface import DistributedOptim
        >>> class DistributedSGD(DistributedOptim, torch.optim.SGD):
        ...     def setup_distributed(self, tp_group=None, dp_group=None, *args, **kwargs):
        ...         self.groups = tp_group, dp_group
        >>> optimizer = DistributedSGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> optimizer.setup_distributed()
        >>> optimizer.groups
        (None, None)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    @abstractmethod
    def setup_distributed(
        self,
        tp_group: dist.ProcessGroup | None = None,
        dp_group: dist.ProcessGroup | None = None,
        shard_to_working_param: Mapping[int, Tensor] | None = None,
        padding_map: Mapping[Any, int] | None = None,
        is_zero: bool = False,
    ) -> None:
        """Learn on which ranks the parameters are.

        Args:
            tp_group: The ranks that shard a parameter.
            dp_group: The replicas.
            shard_to_working_param: The working parameter of each shard, by the id of the shard.
            padding_map: How many elements were appended to a parameter.
            is_zero: Whether replicas shard the states of the optimizer.
        """
