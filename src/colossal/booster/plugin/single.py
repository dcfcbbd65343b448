"""No parallelism: what a `Booster` without a plugin does."""

from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from colossal.booster.boosted import Boosted
from colossal.booster.mixed_precision import MixedPrecision
from colossal.booster.plugin.base import Criterion, Plugin, place
from colossal.checkpoint_io import CheckpointIO, GeneralCheckpointIO


@final
class SingleProcessPlugin(Plugin):
    """Trains in this process alone, with or without a world around it.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> model, *_ = Booster(device="cpu").boost(torch.nn.Linear(2, 1))
        >>> model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """

    supported_devices = ("cpu", "cuda")
    supported_precisions = ("fp16", "bf16")

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        criterion: Criterion | None,
        dataloader: DataLoader[Any] | None,
        lr_scheduler: LRScheduler | None,
        device: torch.device,
        precision: MixedPrecision | None,
    ) -> Boosted:
        """Put the training components together.

        Args:
            model: The user's model, on any device.
            optimizer: The optimizer of the model's parameters.
            criterion: The loss function.
            dataloader: The source of batches.
            lr_scheduler: The schedule of the optimizer.
            device: Where the model goes.
            precision: What runs in half precision; nothing by default.
        """
        wrapped, optim, criterion = place(model, optimizer, criterion, device, precision)
        return Boosted(wrapped, optim, criterion, dataloader, lr_scheduler)

    def get_checkpoint_io(self) -> CheckpointIO:
        """Return a checkpoint IO whose calling process writes."""
        return GeneralCheckpointIO()

    def data_parallel_place(self) -> tuple[int, int]:
        """Return 0 and 1: this process sees all data."""
        return 0, 1
