"""What goes into boosting, and what comes out."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from colossal.interface import ModelWrapper, OptimizerWrapper

Criterion = Callable[..., Any]


@final
@dataclass(frozen=True)
class Parts:
    """The parts of a single-process training program, as the user built them.

    Args:
        model: The model, on any device.
        optimizer: The optimizer of the model's parameters.
        criterion: The loss function.
        dataloader: The source of batches.
        lr_scheduler: The schedule of the optimizer.
    """

    model: nn.Module
    optimizer: Optimizer | None = None
    criterion: Criterion | None = None
    dataloader: DataLoader[Any] | None = None
    lr_scheduler: LRScheduler | None = None


class Executor(Protocol):
    """Runs the forward and backward passes of a batch where a plain call of the model can not."""

    def __call__(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Run the next batch; the arguments are those of `Booster.execute_pipeline`."""
        ...


@final
@dataclass(frozen=True)
class Capabilities:
    """What can be done with a boosted model besides a plain step.

    Args:
        no_sync: Opens a context in which backward passes accumulate gradients without reducing them over ranks.
            Without data parallelism there is nothing to leave out.
        executor: Runs the batches of a model that is cut into pipeline stages; None for a whole model.
    """

    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    executor: Executor | None = None


@final
@dataclass(frozen=True)
class Boosted:
    """The parts of a training program as a plugin made them.

    Args:
        model: The model, wrapped.
        optimizer: The optimizer, wrapped.
        criterion: The loss function, in the precision of the model.
        dataloader: As given.
        lr_scheduler: As given.
        capabilities: What can be done with the model besides a plain step; nothing by default.
    """

    model: ModelWrapper
    optimizer: OptimizerWrapper | None
    criterion: Criterion | None
    dataloader: DataLoader[Any] | None
    lr_scheduler: LRScheduler | None
    capabilities: Capabilities = Capabilities()
