"""The inputs and results of `Booster.boost`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from colossal._src.interface.model import ModelWrapper
from colossal._src.interface.optimizer import OptimizerWrapper
from colossal.logging import get_dist_logger

Criterion = Callable[..., Any]
BoostResult = tuple[ModelWrapper, OptimizerWrapper | None, Criterion | None, DataLoader[Any] | None, LRScheduler | None]


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

    Example:
        >>> import torch
        >>> from colossal.booster import Parts
        >>> parts = Parts(torch.nn.Linear(2, 1), criterion=torch.nn.MSELoss())
        >>> parts.optimizer is None
        True
    """

    model: nn.Module
    optimizer: Optimizer | None = None
    criterion: Criterion | None = None
    dataloader: DataLoader[Any] | None = None
    lr_scheduler: LRScheduler | None = None


class Executor(Protocol):
    """Runs the forward and backward passes of a batch where a plain call of the model cannot.

    Example:
        >>> from colossal.booster import Capabilities, Executor
        >>> class Echo(Executor):
        ...     def __call__(self, data_iter, criterion, optimizer, return_loss, return_outputs):
        ...         return {"loss": None, "outputs": next(data_iter)}
        >>> Capabilities(executor=Echo()).executor(iter("ab"), None, None, False, True)["outputs"]
        'a'
    """

    def __call__(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Run the next batch.

        Args:
            data_iter: Yields batches.
            criterion: Takes outputs and inputs, returns the loss.
            optimizer: The boosted optimizer; without it only forward passes run.
            return_loss: Return the loss, on all ranks.
            return_outputs: Return the outputs, on the rank with the last stage.

        Returns:
            ``{"loss": ..., "outputs": ...}``.
        """
        ...


def reduce_in_each_pass() -> AbstractContextManager[None]:
    """Open what `Booster.no_sync` opens where each rank keeps a shard of the gradients: passes add up as they are.

    Gradients are the same as with one reduction after several passes; what is sent is not less.
    """
    _log_reduction()
    return nullcontext()


@cache
def _log_reduction() -> None:
    get_dist_logger().info(
        "no_sync: ranks keep shards of the gradients, which every backward pass adds to. Results are the same; "
        "gradients are reduced in each pass, as no rank has room for all of them.",
        ranks=[0],
    )


@final
@dataclass(frozen=True)
class Capabilities:
    """What can be done with a boosted model in addition to a plain step.

    Args:
        no_sync: Opens a context in which backward passes accumulate gradients without reducing them over ranks.
            Without data parallelism there is nothing to leave out.
        executor: Runs the batches of a model that is split into pipeline stages; None for a full model.

    Example:
        >>> from colossal.booster import Capabilities
        >>> whole_model = Capabilities()
        >>> with whole_model.no_sync():
        ...     print(whole_model.executor)
        None
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
        capabilities: What can be done with the model in addition to a plain step; nothing by default.

    Example:
        >>> import torch
        >>> from colossal.booster import Boosted, Parts
        >>> from colossal.booster.plugin import TorchDDPPlugin
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     boosted = TorchDDPPlugin().configure(Parts(torch.nn.Linear(2, 1)), torch.device("cpu"), None)
        >>> isinstance(boosted, Boosted), boosted.optimizer
        (True, None)
    """

    model: ModelWrapper
    optimizer: OptimizerWrapper | None
    criterion: Criterion | None
    dataloader: DataLoader[Any] | None
    lr_scheduler: LRScheduler | None
    capabilities: Capabilities = Capabilities()
