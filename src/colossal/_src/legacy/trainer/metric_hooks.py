# ruff: noqa: ARG002 (a trainer passes all of them to every hook)
"""Metrics that hooks keep for other hooks to show: loss, accuracy, throughput."""

from collections.abc import Callable
from typing import Any

from colossal._src.legacy.registry import HOOKS
from colossal._src.legacy.trainer.base_hook import BaseHook
from colossal._src.legacy.trainer.metrics import AccuracyMetric, LossMetric, Metric, ThroughputMetric
from colossal._src.legacy.utils import is_no_pp_or_last_stage


class MetricHook(BaseHook):
    """Keeps metrics where other hooks find them: ``trainer.states["metrics"]["train"]`` and ``["test"]``."""

    def _show_metric(self, trainer: Any, kind: str, name: str, metric: Metric) -> None:
        self.init_runner_states(trainer, "metrics", {"train": {}, "test": {}})
        trainer.states["metrics"][kind][name] = metric


@HOOKS.register_module
class LossHook(MetricHook):
    """Keeps the mean loss of all samples, of all ranks that have other samples or tokens, as ``Loss``.

    Args:
        priority: Smaller ones run first.

    Attributes:
        train_loss: The metric of training.
        test_loss: The metric of tests.

    Communication: all_reduce, dp and sp, 16 bytes, when another hook asks for it.

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
        self._show_metric(trainer, "train", "Loss", self.train_loss)
        self._show_metric(trainer, "test", "Loss", self.test_loss)

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
        self.train_loss.update(loss, trainer.engine.schedule.batch_size)

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
        self.test_loss.update(loss, trainer.engine.schedule.batch_size)


@HOOKS.register_module
class AccuracyHook(MetricHook):
    """Keeps the fraction of right predictions of all data-parallel ranks, as ``Accuracy``, in training and test.

    Args:
        accuracy_func: Counts the samples that are right of outputs and labels. `colossal.nn.Accuracy` counts labels, of
            which a sample may have several, and leaves those of -100 out.
        priority: Smaller ones run first.

    Attributes:
        train_accuracy: The metric of training.
        metric: The metric of tests.

    Communication: all_reduce, dp and sp, 16 bytes, when another hook asks for it.

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
            self._show_metric(trainer, "train", "Accuracy", self.train_accuracy)
            self._show_metric(trainer, "test", "Accuracy", self.metric)

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
class ThroughputHook(MetricHook):
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
        self._show_metric(trainer, "train", "Throughput", self.metric)
        self._show_metric(trainer, "test", "Throughput", self._test)

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
