"""Rates that are multiplied by a factor at given steps."""

from collections.abc import Sequence
from itertools import pairwise
from typing import final

from torch.optim import Optimizer

from colossal._src.nn.lr_scheduler.curve import Decay, MultiStep, WarmUp
from colossal._src.nn.lr_scheduler.schedule import Schedule, check_integer, check_number, steps_after_warmup
from colossal.errors import ConfigError


def _milestones(milestones: Sequence[int] | None, first: int) -> tuple[int, ...]:
    """Return the milestones counted from step ``first``, if they are in order and none is before it."""
    if not milestones:
        raise ConfigError(
            f"milestones must be a list of at least one step. Found {milestones!r}. "
            "Pass the steps at which the rate is multiplied by gamma."
        )
    for milestone in milestones:
        check_integer("A milestone (the first possible one being the end of the warm-up)", milestone, at_least=first)
    if any(earlier > later for earlier, later in pairwise(milestones)):
        raise ConfigError(f"milestones must be in increasing order. Found {list(milestones)}. Sort them.")
    return tuple(milestone - first for milestone in milestones)


@final
class MultiStepLR(Schedule):
    r"""Multiply the rate by ``gamma`` at every milestone.

    .. math:: \eta_k = b \, \gamma^{|\{m \in milestones : m \le k\}|}, \quad 0 \le k \le T

    with the base rate :math:`b` and :math:`T` = ``total_steps``; held afterwards, so that a milestone beyond
    ``total_steps`` is never reached. A milestone given twice counts twice. Source: He et al., "Deep Residual Learning",
    arXiv:1512.03385.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, at least 1.
        milestones: Steps in increasing order.
        gamma: The factor, above 0.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: ``total_steps`` is below 1, ``milestones`` is missing, empty or unsorted, or ``gamma`` is not
            above 0.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import MultiStepLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = MultiStepLR(optimizer, total_steps=3, milestones=[2, 3], gamma=0.5)
        >>> for _ in range(3):
        ...     optimizer.step()
        ...     scheduler.step()
        ...     print(f"{scheduler.get_last_lr()[0]:.2f}")
        0.80
        0.40
        0.20
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        steps = steps_after_warmup(total_steps, 0)
        curve = MultiStep(steps, _milestones(milestones, 0), check_number("gamma", gamma, above=0.0))
        super().__init__(optimizer, curve, last_epoch)


@final
class MultiStepWarmupLR(Schedule):
    r"""Warm up in a straight line, then multiply the rate by ``gamma`` at every milestone.

    .. math::
        \eta_k = b \frac{k + 1}{w + 1} \; (k < w), \qquad
        \eta_k = b \, \gamma^{|\{m \in milestones : m \le k\}|} \; (w \le k \le T)

    with :math:`w` = ``warmup_steps`` and :math:`T` = ``total_steps``; held afterwards. Milestones are counted from the
    start of the training, not from the end of the warm-up, and none may be within the warm-up. Source: Goyal et al.,
    "Accurate, Large Minibatch SGD", arXiv:1706.02677.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, the warm-up included.
        warmup_steps: Steps of the warm-up, below ``total_steps``.
        milestones: Steps in increasing order, from ``warmup_steps`` on.
        gamma: The factor, above 0.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: A count of steps does not fit, ``milestones`` is missing, empty, unsorted or inside the warm-up, or
            ``gamma`` is not above 0.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import MultiStepWarmupLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = MultiStepWarmupLR(optimizer, total_steps=9, warmup_steps=3, milestones=[5, 7])
        >>> [f"{rate:.2f}" for rate in scheduler.get_last_lr()]
        ['0.20']
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        steps = steps_after_warmup(total_steps, warmup_steps)
        curve = MultiStep(steps, _milestones(milestones, warmup_steps), check_number("gamma", gamma, above=0.0))
        super().__init__(optimizer, WarmUp(warmup_steps, curve), last_epoch)


@final
class StepLR(Schedule):
    r"""Multiply the rate by ``gamma`` every ``step_size`` steps.

    .. math:: \eta_k = b \, \gamma^{\lfloor k / s \rfloor}, \quad 0 \le k \le T

    with the base rate :math:`b`, :math:`s` = ``step_size`` and :math:`T` = ``total_steps``; held afterwards. Source:
    :class:`torch.optim.lr_scheduler.StepLR`.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, at least 1.
        step_size: Steps between two decays, at least 1.
        gamma: The factor, above 0.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: ``total_steps`` or ``step_size`` is below 1, or ``gamma`` is not above 0.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import StepLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = StepLR(optimizer, total_steps=4, step_size=2, gamma=0.5)
        >>> for _ in range(3):
        ...     optimizer.step()
        ...     scheduler.step()
        ...     print(f"{scheduler.get_last_lr()[0]:.2f}")
        0.80
        0.40
        0.40
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        step_size: int = 1,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        every = check_integer("step_size", step_size, at_least=1)
        curve = Decay(steps_after_warmup(total_steps, 0), every, check_number("gamma", gamma, above=0.0))
        super().__init__(optimizer, curve, last_epoch)


@final
class ExponentialLR(Schedule):
    r"""Multiply the rate by ``gamma`` at every step.

    .. math:: \eta_k = b \, \gamma^k, \quad 0 \le k \le T

    with the base rate :math:`b` and :math:`T` = ``total_steps``; held afterwards. A ``gamma`` above 1 makes the rate
    grow, as in a learning-rate range test. Source: Smith, "Cyclical Learning Rates", arXiv:1506.01186.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, at least 1.
        gamma: The factor, above 0. The default of 1 keeps the rate.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: ``total_steps`` is below 1, or ``gamma`` is not above 0.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import ExponentialLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = ExponentialLR(optimizer, total_steps=2, gamma=0.5)
        >>> for _ in range(2):
        ...     optimizer.step()
        ...     scheduler.step()
        ...     print(f"{scheduler.get_last_lr()[0]:.2f}")
        0.40
        0.20
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        curve = Decay(steps_after_warmup(total_steps, 0), 1, check_number("gamma", gamma, above=0.0))
        super().__init__(optimizer, curve, last_epoch)
