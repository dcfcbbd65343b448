"""Numbers that hooks keep over the iterations of an epoch, the same on all data-parallel ranks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from colossal._src.cluster import Axis
from colossal._src.comm import Channel
from colossal._src.legacy.utils import synchronize
from colossal._src.legacy.utils.parallel_state import axis_rank, axis_size, is_no_pp_or_last_stage
from colossal._src.nn.metric import Accuracy
from colossal.errors import ConfigError


class Metric(ABC):
    """A number of the last iteration, and one of all iterations since `reset`.

    Args:
        epoch_only: Whether it is logged for epochs only.

    Attributes:
        epoch_only: As passed.

    Example:
        >>> from colossal.legacy.trainer import Metric
        >>> class Count(Metric):
        ...     def reset(self): self.count = 0
        ...     def update(self): self.count += 1
        ...     def get_last_step_value(self): return 1.0
        ...     def get_accumulated_value(self): return float(self.count)
        >>> metric = Count(epoch_only=False)
        >>> metric.reset()
        >>> metric.update()
        >>> metric.get_accumulated_value()
        1.0
    """

    def __init__(self, epoch_only: bool = False) -> None:
        self.epoch_only = epoch_only

    @abstractmethod
    def reset(self) -> None:
        """Forget all iterations."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take over the numbers of an iteration.

        Args:
            *args: What the metric needs of it.
            **kwargs: Likewise.
        """

    @abstractmethod
    def get_last_step_value(self) -> float:
        """Return the number of the last iteration.

        Returns:
            The number.
        """

    @abstractmethod
    def get_accumulated_value(self) -> float:
        """Return the number of all iterations since `reset`.

        Returns:
            The number.
        """


def over_replicas(*values: float, axes: Sequence[Axis] = ("dp", "sp")) -> list[float]:
    """Sum numbers over the ranks that have other samples or tokens. Communication: all_reduce, axes, 8 bytes each."""
    total = torch.tensor(values, dtype=torch.float64, device="cpu")
    for axis in axes if dist.is_initialized() else ():
        total = Channel(axis).all_reduce(total) if axis_size(axis) > 1 else total
    return total.tolist()


def _ratio(part: float, number: float) -> float:
    return part / number if number else 0.0


class LossMetric(Metric):
    """The mean loss of all samples, whichever ranks and iterations they were on."""

    def __init__(self, epoch_only: bool = False) -> None:
        super().__init__(epoch_only)
        self.reset()

    def reset(self) -> None:
        self._last, self._total = (0.0, 0), (0.0, 0)

    def update(self, loss: torch.Tensor, num_samples: int = 1) -> None:
        number = max(1, num_samples)  # the last batch of an epoch may be smaller than the others
        self._last = float(loss) * number, number
        self._total = self._total[0] + self._last[0], self._total[1] + number

    def get_last_step_value(self) -> float:
        return _ratio(*over_replicas(*self._last))

    def get_accumulated_value(self) -> float:
        return _ratio(*over_replicas(*self._total))


class LearningRateMetric(Metric):
    """The learning rate of the first parameter group."""

    def __init__(self, epoch_only: bool, initial_lr: float) -> None:
        super().__init__(epoch_only)
        self._lr = initial_lr

    def reset(self) -> None:
        pass

    def update(self, lr: float) -> None:
        self._lr = lr

    def get_last_step_value(self) -> float:
        return self._lr

    def get_accumulated_value(self) -> float:
        return self._lr


class AccuracyMetric(Metric):
    """Right predictions of all data-parallel ranks, per sample of theirs; those of `Accuracy` per label that counts."""

    def __init__(self, epoch_only: bool, accuracy_func: Callable[..., Any]) -> None:
        super().__init__(epoch_only)
        self._count_right = accuracy_func
        self.reset()

    def reset(self) -> None:
        self._last, self._total = (0.0, 0), (0.0, 0)

    def update(self, logits: Any, targets: Any, batch_size: int) -> None:
        if logits is None or targets is None:
            raise ConfigError(
                "An accuracy compares outputs with labels. Found none. Leave return_output_label=False out of fit, or "
                "take out the AccuracyHook."
            )
        if isinstance(self._count_right, Accuracy):
            if not (isinstance(logits, torch.Tensor) and isinstance(targets, torch.Tensor)):
                raise ConfigError(
                    "colossal.nn.Accuracy compares one tensor of outputs with one of labels. Found outputs of type "
                    f"{type(logits).__name__} and labels of type {type(targets).__name__}. Choose them: accuracy_func="
                    "lambda outputs, labels: Accuracy()(outputs[0], labels)."
                )
            batch_size = int(self._count_right.count_targets(logits, targets))
        self._last = float(self._count_right(logits, targets)), batch_size
        self._total = self._total[0] + self._last[0], self._total[1] + self._last[1]

    def get_last_step_value(self) -> float:
        return self._fraction(*over_replicas(*self._last))

    def get_accumulated_value(self) -> float:
        return self._fraction(*over_replicas(*self._total))

    @staticmethod
    def _fraction(right: float, number: float) -> float:
        if not is_no_pp_or_last_stage():
            raise ConfigError(
                "The last stage of a pipeline has the outputs, and with them the accuracy. Found a read on stage "
                f"{axis_rank('pp')} of {axis_size('pp')}. Read it where is_no_pp_or_last_stage(), or log it by "
                "LogMetricByEpochHook."
            )
        if right > number:
            raise ConfigError(
                f"An accuracy_func returns how many samples of a batch are right. Found {right:g} right of {number:g} "
                "samples. Return at most one for each sample, or pass colossal.nn.Accuracy(), which counts labels, of "
                "which a sample may have several."
            )
        return _ratio(right, number)


class ThroughputMetric(Metric):
    """Samples of all data-parallel ranks for each second of training, without the first iterations."""

    def __init__(self, epoch_only: bool, ignored_steps: int, tflop_per_step: float, use_local: bool) -> None:
        super().__init__(epoch_only)
        self._ignored, self._tflop, self._use_local = ignored_steps, tflop_per_step, use_local
        self._started = 0.0
        self.reset()

    def reset(self) -> None:
        self._last, self._total, self._steps = (0, 0.0), (0, 0.0), 0

    def start(self) -> None:
        """Begin an iteration."""
        synchronize()
        self._started = time.perf_counter()

    def update(self, num_samples: int) -> None:
        synchronize()
        self._last = num_samples, time.perf_counter() - self._started
        self._steps += 1
        if self._steps > self._ignored:
            self._total = self._total[0] + self._last[0], self._total[1] + self._last[1]

    def _rate(self, samples: float, seconds: float) -> float:
        if not self._use_local:
            samples, total = over_replicas(samples, seconds, axes=("dp",))
            seconds = total / axis_size("dp")
        return samples / seconds if seconds else 0.0

    def get_last_step_value(self) -> float:
        return self._rate(*self._last)

    def get_accumulated_value(self) -> float:
        return self._rate(*self._total)

    def get_last_step_info(self) -> str:
        """Return the rate of the last iteration, and the TFLOPS that it means if their number per step is known."""
        rate = f"{self.get_last_step_value():.3f} sample_per_sec"
        seconds = self._last[1]
        return f"{rate}, {self._tflop / seconds:.3f} Tflops" if self._tflop and seconds else rate
