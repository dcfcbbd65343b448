# ruff: noqa: ARG002 (a trainer passes all of them to every hook)
"""The schedule of the learning rate as a hook of a trainer."""

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from colossal._src.legacy.registry import HOOKS
from colossal._src.legacy.trainer.metric_hooks import MetricHook
from colossal._src.legacy.trainer.metrics import LearningRateMetric
from colossal.errors import UnsupportedError


@HOOKS.register_module
class LRSchedulerHook(MetricHook):
    """Runs the schedule of the learning rate, after each epoch or each iteration.

    Args:
        lr_scheduler: The schedule.
        by_epoch: Run it after epochs; after iterations otherwise: of those that accumulate gradients, after updates,
            if it is the schedule that `initialize` returned.
        store_lr_in_state: Keep the learning rate as the metric ``LR``.
        priority: Smaller ones run first.

    Attributes:
        lr_scheduler: The schedule.

    Raises:
        UnsupportedError: The schedule is a `ReduceLROnPlateau`.

    Example:
        >>> import torch
        >>> from colossal.legacy.trainer import LRSchedulerHook
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        >>> LRSchedulerHook(torch.optim.lr_scheduler.StepLR(optimizer, 2), by_epoch=True).priority
        1
    """

    def __init__(self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1) -> None:
        super().__init__(priority)
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            raise UnsupportedError(
                "LRSchedulerHook calls lr_scheduler.step() without a metric. Found ReduceLROnPlateau, which takes one. "
                "Take another schedule, or step it in a hook of your own: lr_scheduler.step("
                'trainer.metrics("test")["Loss"].get_accumulated_value()).'
            )
        self.lr_scheduler, self.by_epoch, self.store_lr_in_state = lr_scheduler, by_epoch, store_lr_in_state
        self._metric = LearningRateMetric(by_epoch, self._lr)

    @property
    def _lr(self) -> float:
        return float(self.lr_scheduler.get_last_lr()[0])

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Show the metrics to other hooks, before the training begins.

        Args:
            trainer: The trainer that runs the hook.
        """
        if self.store_lr_in_state:
            self._show_metric(trainer, "train", "LR", self._metric)

    def after_train_epoch(self, trainer: Any) -> None:
        """Do its work after an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        if self.by_epoch:
            self._go_on()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of training gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        if not self.by_epoch:
            self._go_on()

    def _go_on(self) -> None:
        self.lr_scheduler.step()
        self._metric.update(self._lr)
