# ruff: noqa: ARG002 (a trainer passes all of them to every hook)
"""What a trainer does around iterations and epochs: metrics, schedules of the learning rate, checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from colossal._src.legacy.registry import HOOKS
from colossal._src.legacy.trainer.metrics import (
    AccuracyMetric,
    LearningRateMetric,
    LossMetric,
    Metric,
    ThroughputMetric,
)
from colossal._src.legacy.utils import is_no_pp_or_last_stage, save_checkpoint
from colossal.errors import ConfigError
from colossal.logging import get_dist_logger


class BaseHook:
    """Runs at the life-cycle of a trainer; override what is of interest.

    Hooks run in the order of their priority, the smallest first; those of one priority in the order of the list.

    Args:
        priority: The priority.

    Attributes:
        priority: As passed; 10 for a subclass that does not call this constructor.

    Example:
        >>> from colossal.legacy.trainer import BaseHook
        >>> class Report(BaseHook):
        ...     def before_train(self, trainer):
        ...         print("training starts")
        >>> Report().priority
        10
    """

    priority: int = 10

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Run when the trainer has all its hooks.

        Args:
            trainer: The trainer.
        """

    def before_train(self, trainer: Any) -> None:
        """Run before the first epoch.

        Args:
            trainer: The trainer.
        """

    def after_train(self, trainer: Any) -> None:
        """Run after the last epoch.

        Args:
            trainer: The trainer.
        """

    def before_train_iter(self, trainer: Any) -> None:
        """Run before an iteration.

        Args:
            trainer: The trainer.
        """

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Run after an iteration.

        Args:
            trainer: The trainer.
            output: Of the model; None on other stages of a pipeline than the last, or if it is not returned.
            label: Of the batch; None likewise.
            loss: The loss, a scalar.
        """

    def before_train_epoch(self, trainer: Any) -> None:
        """Run before an epoch.

        Args:
            trainer: The trainer.
        """

    def after_train_epoch(self, trainer: Any) -> None:
        """Run after an epoch.

        Args:
            trainer: The trainer.
        """

    def before_test(self, trainer: Any) -> None:
        """Run before a test.

        Args:
            trainer: The trainer.
        """

    def after_test(self, trainer: Any) -> None:
        """Run after a test.

        Args:
            trainer: The trainer.
        """

    def before_test_epoch(self, trainer: Any) -> None:
        """Run before the batches of a test.

        Args:
            trainer: The trainer.
        """

    def after_test_epoch(self, trainer: Any) -> None:
        """Run after the batches of a test.

        Args:
            trainer: The trainer.
        """

    def before_test_iter(self, trainer: Any) -> None:
        """Run before a batch of a test.

        Args:
            trainer: The trainer.
        """

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Run after a batch of a test.

        Args:
            trainer: The trainer.
            output: Of the model; None on other stages of a pipeline than the last, or if it is not returned.
            label: Of the batch; None likewise.
            loss: The loss, a scalar.
        """

    def init_runner_states(self, trainer: Any, key: str, val: Any) -> None:
        """Set an entry of `Trainer.states` if there is none.

        Args:
            trainer: The trainer.
            key: The name of the entry.
            val: Its value.
        """
        trainer.states.setdefault(key, val)


class _MetricHook(BaseHook):
    """Keeps metrics where other hooks find them: ``trainer.states["metrics"]["train"]`` and ``["test"]``."""

    def _show(self, trainer: Any, kind: str, name: str, metric: Metric) -> None:
        self.init_runner_states(trainer, "metrics", {"train": {}, "test": {}})
        trainer.states["metrics"][kind][name] = metric


@HOOKS.register_module
class LossHook(_MetricHook):
    """Keeps the mean loss of the data-parallel ranks, as ``Loss``.

    Args:
        priority: Smaller ones run first.

    Attributes:
        train_loss: The metric of training.
        test_loss: The metric of tests.

    Communication: all_reduce, dp, 8 bytes, when another hook asks for it.

    Example:
        >>> from colossal.legacy.trainer import LossHook
        >>> LossHook().priority
        0
    """

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self.train_loss, self.test_loss = LossMetric(), LossMetric()

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Show the metrics to other hooks, before the training begins.

        Args:
            trainer: The trainer that runs the hook.
        """
        self._show(trainer, "train", "Loss", self.train_loss)
        self._show(trainer, "test", "Loss", self.test_loss)

    def before_train_epoch(self, trainer: Any) -> None:
        """Begin anew, before an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        self.train_loss.reset()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of training gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        self.train_loss.update(loss)

    def before_test_epoch(self, trainer: Any) -> None:
        """Begin anew, before an epoch of a test.

        Args:
            trainer: The trainer that runs the hook.
        """
        self.test_loss.reset()

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of a test gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        self.test_loss.update(loss)


@HOOKS.register_module
class AccuracyHook(_MetricHook):
    """Keeps the fraction of right predictions of all data-parallel ranks, as ``Accuracy``, in training and test.

    Args:
        accuracy_func: Counts the right ones of outputs and labels, as `colossal.nn.Accuracy` does.
        priority: Smaller ones run first.

    Attributes:
        train_accuracy: The metric of training.
        metric: The metric of tests.

    Communication: all_reduce, dp, 16 bytes, when another hook asks for it.

    Example:
        >>> from colossal.legacy.trainer import AccuracyHook
        >>> from colossal.nn import Accuracy
        >>> AccuracyHook(accuracy_func=Accuracy()).priority
        0
    """

    def __init__(self, accuracy_func: Callable[..., Any], priority: int = 0) -> None:
        super().__init__(priority)
        self.train_accuracy = AccuracyMetric(False, accuracy_func)
        self.metric = AccuracyMetric(True, accuracy_func)

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Show the metrics to other hooks, before the training begins.

        Args:
            trainer: The trainer that runs the hook.
        """
        if is_no_pp_or_last_stage():
            self._show(trainer, "train", "Accuracy", self.train_accuracy)
            self._show(trainer, "test", "Accuracy", self.metric)

    def before_train_epoch(self, trainer: Any) -> None:
        """Begin anew, before an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        self.train_accuracy.reset()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of training gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        self._update(trainer, self.train_accuracy, output, label)

    def before_test_epoch(self, trainer: Any) -> None:
        """Begin anew, before an epoch of a test.

        Args:
            trainer: The trainer that runs the hook.
        """
        self.metric.reset()

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of a test gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        self._update(trainer, self.metric, output, label)

    @staticmethod
    def _update(trainer: Any, metric: AccuracyMetric, output: Any, label: Any) -> None:
        if is_no_pp_or_last_stage():
            metric.update(output, label, trainer.engine.schedule.batch_size)


@HOOKS.register_module
class LRSchedulerHook(_MetricHook):
    """Runs the schedule of the learning rate, after each epoch or each iteration.

    Args:
        lr_scheduler: The schedule.
        by_epoch: Run it after epochs; after iterations otherwise: of those that accumulate gradients, after updates,
            if it is the schedule that `initialize` returned.
        store_lr_in_state: Keep the learning rate as the metric ``LR``.
        priority: Smaller ones run first.

    Attributes:
        lr_scheduler: The schedule.

    Example:
        >>> import torch
        >>> from colossal.legacy.trainer import LRSchedulerHook
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        >>> LRSchedulerHook(torch.optim.lr_scheduler.StepLR(optimizer, 2), by_epoch=True).priority
        1
    """

    def __init__(self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1) -> None:
        super().__init__(priority)
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
            self._show(trainer, "train", "LR", self._metric)

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


@HOOKS.register_module
class ThroughputHook(_MetricHook):
    """Keeps the number of samples for each second, of all data-parallel ranks, as ``Throughput``.

    Args:
        ignored_steps: Number of first iterations of an epoch that do not count.
        priority: Smaller ones run first.
        tflop_per_step: Floating-point operations of an iteration, in units of 10**12, to show their rate; 0 does not.
        use_local: Count this rank only.

    Attributes:
        metric: The metric of training.

    Communication: all_reduce, dp, 16 bytes, when another hook asks for it.

    Example:
        >>> from colossal.legacy.trainer import ThroughputHook
        >>> ThroughputHook(ignored_steps=2).priority
        10
    """

    def __init__(
        self, ignored_steps: int = 0, priority: int = 10, tflop_per_step: float = 0, use_local: bool = False
    ) -> None:
        super().__init__(priority)
        self.metric = ThroughputMetric(False, ignored_steps, tflop_per_step, use_local)
        self._test = ThroughputMetric(False, ignored_steps, tflop_per_step, use_local)

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Show the metrics to other hooks, before the training begins.

        Args:
            trainer: The trainer that runs the hook.
        """
        self._show(trainer, "train", "Throughput", self.metric)
        self._show(trainer, "test", "Throughput", self._test)

    def before_train_epoch(self, trainer: Any) -> None:
        """Begin anew, before an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        self.metric.reset()

    def before_train_iter(self, trainer: Any) -> None:
        """Prepare, before an iteration of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        self.metric.start()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of training gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        self.metric.update(trainer.engine.schedule.batch_size)

    def before_test_epoch(self, trainer: Any) -> None:
        """Begin anew, before an epoch of a test.

        Args:
            trainer: The trainer that runs the hook.
        """
        self._test.reset()

    def before_test_iter(self, trainer: Any) -> None:
        """Prepare, before an iteration of a test.

        Args:
            trainer: The trainer that runs the hook.
        """
        self._test.start()

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of a test gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        self._test.update(trainer.engine.schedule.batch_size)


@HOOKS.register_module
class SaveCheckpointHook(BaseHook):
    """Saves model, optimizer and schedule in one file, by `save_checkpoint`.

    Args:
        interval: Number of epochs, or iterations, between two files.
        checkpoint_dir: A folder, in which a file is written for each epoch or iteration; or a path with a suffix: a
            file that is written again each time.
        model: The model; that of the engine by default.
        save_by_iter: Count iterations.
        priority: Smaller ones run first.

    Raises:
        ConfigError: There is no folder, or the interval is less than 1.

    Communication: that of `save_checkpoint`.

    Example:
        >>> from colossal.legacy.trainer import SaveCheckpointHook
        >>> SaveCheckpointHook(interval=1, checkpoint_dir="./ckpt").priority
        10
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | Path | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        if checkpoint_dir is None or interval < 1:
            raise ConfigError(
                "Checkpoints are written into a folder, every epoch or less often. Found checkpoint_dir="
                f"{checkpoint_dir!r} and interval={interval}. Pass checkpoint_dir='./ckpt', interval=1."
            )
        self.interval, self.checkpoint_dir, self.model = interval, Path(checkpoint_dir), model
        self.save_by_iter = save_by_iter
        self._lr_scheduler: Any = None

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Show the metrics to other hooks, before the training begins.

        Args:
            trainer: The trainer that runs the hook.
        """
        for hook in trainer.hooks:
            if isinstance(hook, LRSchedulerHook):
                self._lr_scheduler = hook.lr_scheduler
        inside = self.model is not None and any(each is self.model for each in trainer.engine.model.modules())
        # a model from before initialize may be a stage, or have its gradients elsewhere: the engine knows its names
        self.model = trainer.engine.model if self.model is None or inside else self.model

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of training gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        if self.save_by_iter and (trainer.cur_step + 1) % self.interval == 0:
            self._save(trainer, f"step_{trainer.cur_step + 1}.pt")

    def after_train_epoch(self, trainer: Any) -> None:
        """Do its work after an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        if not self.save_by_iter and (trainer.cur_epoch + 1) % self.interval == 0:
            self._save(trainer, f"epoch_{trainer.cur_epoch}.pt")

    def _save(self, trainer: Any, name: str) -> None:
        assert self.model is not None
        file = self.checkpoint_dir if self.checkpoint_dir.suffix else self.checkpoint_dir / name
        save_checkpoint(file, trainer.cur_epoch, self.model, trainer.engine.optimizer, self._lr_scheduler)
        get_dist_logger().info(f"Saved epoch {trainer.cur_epoch} in {file}", ranks=[0])
