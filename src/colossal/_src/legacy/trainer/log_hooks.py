# ruff: noqa: ARG002 (a trainer passes all of them to every hook)
"""Hooks that write: metrics, times and memory into the log, metrics for TensorBoard."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist

from colossal._src.legacy.context import ParallelMode, global_context
from colossal._src.legacy.registry import HOOKS
from colossal._src.legacy.trainer.base_hook import BaseHook
from colossal._src.legacy.trainer.metrics import ThroughputMetric
from colossal._src.legacy.utils import (
    MultiTimer,
    report_memory_usage,
)
from colossal._src.legacy.utils.parallel_state import is_logging_rank
from colossal.errors import ConfigError, UnsupportedError
from colossal.logging import get_dist_logger


class _EpochLog(BaseHook):
    """Logs every few epochs, on the first rank of those that have outputs."""

    def __init__(self, logger: Any, interval: int, priority: int) -> None:
        super().__init__(priority)
        if interval < 1:
            raise ConfigError(
                f"An interval is 1 epoch or more. Found interval={interval}. Leave it out for every epoch."
            )
        self.logger, self._interval = logger or get_dist_logger(), interval

    def _is_epoch_to_log(self, trainer: Any) -> bool:
        return trainer.cur_epoch % self._interval == 0

    def _log(self, text: str) -> None:
        if is_logging_rank():
            self.logger.info(text)


@HOOKS.register_module
class LogMetricByStepHook(BaseHook):
    """Shows the metrics of each iteration next to the progress bar, as ``trainer.states["step_metrics"]``.

    Args:
        priority: Smaller ones run first.

    Communication: that of the metrics.

    Example:
        >>> from colossal.legacy.trainer import LogMetricByStepHook
        >>> LogMetricByStepHook().priority
        10
    """

    def __init__(self, priority: int = 10) -> None:
        super().__init__(priority)

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of training gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        self._note(trainer, "train")

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of a test gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        self._note(trainer, "test")

    @staticmethod
    def _note(trainer: Any, kind: str) -> None:
        noted = trainer.states["step_metrics"] = dict[str, str]()
        for name, metric in trainer.metrics(kind).items():
            if isinstance(metric, ThroughputMetric):
                noted[name.lower()] = metric.get_last_step_info()
            elif not metric.epoch_only:
                noted[name.lower()] = f"{metric.get_last_step_value():.6g}"


@HOOKS.register_module
class LogMetricByEpochHook(_EpochLog):
    """Logs all metrics after each epoch and test.

    Args:
        logger: Its `info` is called, on one rank; that of `get_dist_logger` by default.
        interval: Number of epochs between two lines.
        priority: Smaller ones run first.

    Raises:
        ConfigError: The interval is less than 1.

    Communication: that of the metrics.

    Example:
        >>> from colossal.legacy.trainer import LogMetricByEpochHook
        >>> from colossal.logging import get_dist_logger
        >>> LogMetricByEpochHook(get_dist_logger()).priority
        10
    """

    def __init__(self, logger: Any = None, interval: int = 1, priority: int = 10) -> None:
        super().__init__(logger, interval, priority)

    def after_train_epoch(self, trainer: Any) -> None:
        """Do its work after an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        self._log_metrics(trainer, "Train")

    def after_test_epoch(self, trainer: Any) -> None:
        """Do its work after an epoch of a test.

        Args:
            trainer: The trainer that runs the hook.
        """
        self._log_metrics(trainer, "Test")

    def _log_metrics(self, trainer: Any, kind: str) -> None:
        if self._is_epoch_to_log(trainer):
            values = {name: metric.get_accumulated_value() for name, metric in trainer.metrics(kind.lower()).items()}
            text = ", ".join(f"{name} = {value:.5g}" for name, value in values.items())
            self._log(f"[Epoch {trainer.cur_epoch} / {kind}]: {text}")


@HOOKS.register_module
class LogTimingByEpochHook(_EpochLog):
    """Logs the times of a trainer's timer after each epoch and test.

    Args:
        timer: That of the trainer.
        logger: Its `info` is called, on one rank.
        interval: Number of epochs between two lines.
        priority: Smaller ones run first.
        log_eval: Log after tests too.
        ignore_num_train_steps: Number of first iterations of each epoch that the mean leaves out; -1 for none.

    Raises:
        ConfigError: The interval is less than 1.

    Example:
        >>> from colossal.legacy.trainer import LogTimingByEpochHook
        >>> from colossal.legacy.utils import MultiTimer
        >>> LogTimingByEpochHook(MultiTimer()).priority
        10
    """

    def __init__(
        self,
        timer: MultiTimer,
        logger: Any = None,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        ignore_num_train_steps: int = -1,
    ) -> None:
        super().__init__(logger, interval, priority)
        self._timer, self._log_eval = timer, log_eval
        self._num_ignored = max(0, ignore_num_train_steps)
        self._num_seen, self._seconds_ignored = 0, 0.0

    def before_train_epoch(self, trainer: Any) -> None:
        """Begin anew, before an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        self._num_seen, self._seconds_ignored = 0, 0.0

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of training gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        if self._timer.is_on():
            self._num_seen += 1
            if self._num_seen == self._num_ignored:
                self._seconds_ignored = self._timer.get_timer("Train-step").get_history_sum()

    def after_train_epoch(self, trainer: Any) -> None:
        """Do its work after an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        if self._is_epoch_to_log(trainer) and self._timer.is_on():
            self._log(f"[Epoch {trainer.cur_epoch} / Train]: {self._times('Train')}")

    def after_test_epoch(self, trainer: Any) -> None:
        """Do its work after an epoch of a test.

        Args:
            trainer: The trainer that runs the hook.
        """
        if self._log_eval and self._is_epoch_to_log(trainer) and self._timer.is_on():
            self._log(f"[Epoch {trainer.cur_epoch} / Test]: {self._times('Test')}")

    def _times(self, kind: str) -> str:
        texts: list[str] = []
        for name, timer in self._timer:
            if not name.startswith(kind):
                continue
            if not timer.has_history:
                texts.append(f"{name}: {timer.get_elapsed_time():.5g} s")
                continue
            seconds, mean = timer.get_history_sum(), timer.get_history_mean()
            if name == "Train-step" and self._num_ignored < self._num_seen:
                mean = (seconds - self._seconds_ignored) / (self._num_seen - self._num_ignored)
            texts.append(f"{name}: mean {mean:.5g} s, sum {seconds:.5g} s")
        return ", ".join(texts)


@HOOKS.register_module
class LogMemoryByEpochHook(_EpochLog):
    """Logs the memory in use before training, and after each epoch and test.

    Args:
        logger: Its `info` is called.
        interval: Number of epochs between two lines.
        priority: Smaller ones run first.
        log_eval: Log after tests too.
        report_cpu: Log the memory of the host too.

    Raises:
        ConfigError: The interval is less than 1.

    Example:
        >>> from colossal.legacy.trainer import LogMemoryByEpochHook
        >>> from colossal.logging import get_dist_logger
        >>> LogMemoryByEpochHook(get_dist_logger()).priority
        10
    """

    def __init__(
        self,
        logger: Any = None,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        report_cpu: bool = False,
    ) -> None:
        super().__init__(logger, interval, priority)
        self._log_eval, self._report_cpu = log_eval, report_cpu

    def before_train(self, trainer: Any) -> None:
        """Begin, before the first epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        self._report("Before train")

    def after_train_epoch(self, trainer: Any) -> None:
        """Do its work after an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        if self._is_epoch_to_log(trainer):
            self._report(f"[Epoch {trainer.cur_epoch} / Train]")

    def after_test(self, trainer: Any) -> None:
        """Do its work after a test.

        Args:
            trainer: The trainer that runs the hook.
        """
        if self._log_eval and self._is_epoch_to_log(trainer):
            self._report(f"[Epoch {trainer.cur_epoch} / Test]")

    def _report(self, message: str) -> None:
        if is_logging_rank():
            report_memory_usage(message, self.logger, report_cpu=self._report_cpu)


@HOOKS.register_module
class TensorboardHook(BaseHook):
    """Writes metrics for TensorBoard: those of iterations by number of the iteration, all by epoch.

    Args:
        log_dir: A folder; each of several ranks that write has one of its own in it.
        ranks: Which ranks of their group write; by default one, the first of those that have outputs and labels.
        parallel_mode: The group in which these ranks count.
        priority: Smaller ones run first.

    Raises:
        UnsupportedError: The package tensorboard is not installed.

    Communication: that of the metrics.

    Attributes:
        writer: Writes the events; None on ranks that write none.

    Example:
        >>> from colossal.legacy.trainer import TensorboardHook
        >>> TensorboardHook.__init__.__defaults__[0] is None
        True
    """

    def __init__(
        self,
        log_dir: str | Path,
        ranks: Sequence[int] | None = None,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UnsupportedError(
                "TensorboardHook writes by the package tensorboard. Found that it is not installed. Run: pip install "
                "tensorboard."
            ) from error
        rank, wanted = 0, list(ranks or [0])
        if dist.is_initialized():
            is_inside = global_context.is_initialized(parallel_mode)
            rank = global_context.get_local_rank(parallel_mode) if is_inside else 0
            if ranks is None:  # of a pipeline, the first stage has no accuracy
                rank = 0 if is_logging_rank() else -1
        self.log_dir = Path(log_dir) if len(wanted) == 1 else Path(log_dir) / f"{parallel_mode.name}_rank_{rank}"
        self.writer: Any = SummaryWriter(str(self.log_dir)) if rank in wanted else None

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of training gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        for name, metric in trainer.metrics("train").items():
            if not metric.epoch_only:
                self._write(f"{name}/train", metric.get_last_step_value(), trainer.cur_step)

    def after_train_epoch(self, trainer: Any) -> None:
        """Do its work after an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        self._write_epoch(trainer, "train")

    def after_test_epoch(self, trainer: Any) -> None:
        """Do its work after an epoch of a test.

        Args:
            trainer: The trainer that runs the hook.
        """
        self._write_epoch(trainer, "test")

    def after_train(self, trainer: Any) -> None:
        """End, after the last epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        if self.writer is not None:
            self.writer.flush()

    def _write_epoch(self, trainer: Any, kind: str) -> None:
        for name, metric in trainer.metrics(kind).items():
            self._write(f"epoch/{name}/{kind}", metric.get_accumulated_value(), trainer.cur_epoch)

    def _write(self, name: str, value: float, index: int) -> None:
        if self.writer is not None:
            self.writer.add_scalar(name, value, index)
