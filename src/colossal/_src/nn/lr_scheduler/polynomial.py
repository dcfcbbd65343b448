"""Polynomial decay, with and without a warm-up, and its straight special case."""

from typing import final

from torch.optim import Optimizer

from colossal._src.nn.lr_scheduler.curve import Polynomial, WarmUp
from colossal._src.nn.lr_scheduler.schedule import (
    Schedule,
    check_final_lr,
    check_integer,
    check_number,
    steps_after_warmup,
)
from colossal.logging import get_dist_logger


def _polynomial(optimizer: Optimizer, steps: int, end_lr: float, power: float) -> Polynomial:
    return Polynomial(steps, check_final_lr("end_lr", end_lr, optimizer), check_number("power", power, above=0.0))


@final
class LinearWarmupLR(Schedule):
    r"""Warm up in a straight line, then go down in a straight line to zero.

    .. math::
        \eta_k = b \frac{k + 1}{w + 1} \; (k < w), \qquad \eta_k = b \frac{T - k}{T - w} \; (w \le k \le T)

    with the base rate :math:`b`, :math:`w` = ``warmup_steps`` and :math:`T` = ``total_steps``; zero afterwards. Where
    :math:`T \le w` there is nothing after the warm-up: it takes its :math:`w` steps, the base rate is held afterwards,
    and a warning says that no rate goes down. Source: Devlin et al., "BERT", arXiv:1810.04805.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, the warm-up included.
        warmup_steps: Steps of the warm-up, usually below ``total_steps``.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: A count of steps does not fit.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import LinearWarmupLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = LinearWarmupLR(optimizer, total_steps=3, warmup_steps=1)
        >>> for _ in range(3):
        ...     optimizer.step()
        ...     scheduler.step()
        ...     print(f"{scheduler.get_last_lr()[0]:.2f}")
        0.80
        0.40
        0.00
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        check_integer("warmup_steps", warmup_steps, at_least=0)
        check_integer("total_steps", total_steps, at_least=1)
        # Programs of the older documentation count epochs here and steps there, and end within the warm-up.
        if warmup_steps >= total_steps:
            get_dist_logger().warning(
                "LinearWarmupLR goes down after its warm-up if warmup_steps is below total_steps. Found "
                f"warmup_steps={warmup_steps} and total_steps={total_steps}: the rate rises for {warmup_steps} steps, "
                "and is held afterwards. Count both in calls of step().",
                ranks=[0],
            )
            total_steps = warmup_steps
        line = _polynomial(optimizer, total_steps - warmup_steps, 0.0, 1.0)
        super().__init__(optimizer, WarmUp(warmup_steps, line), last_epoch)


@final
class PolynomialLR(Schedule):
    r"""Decay to ``end_lr`` along a power of the remaining fraction of steps.

    .. math:: \eta_k = e + (b - e) (1 - k / T)^p, \quad 0 \le k \le T

    with the base rate :math:`b`, :math:`e` = ``end_lr``, :math:`p` = ``power`` and :math:`T` = ``total_steps``; held
    afterwards. With ``end_lr=0`` it is PyTorch's schedule of the same name. Source: Chen et al., "DeepLab",
    arXiv:1606.00915.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps until ``end_lr`` is reached, at least 1.
        end_lr: The final rate, not above any base rate.
        power: The exponent, above 0. One gives a straight line.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: ``total_steps`` is below 1, ``power`` is not above 0, or ``end_lr`` is above a base rate.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import PolynomialLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = PolynomialLR(optimizer, total_steps=2, end_lr=0.0, power=2.0)
        >>> for _ in range(2):
        ...     optimizer.step()
        ...     scheduler.step()
        ...     print(f"{scheduler.get_last_lr()[0]:.2f}")
        0.20
        0.00
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        end_lr: float = 1e-4,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        curve = _polynomial(optimizer, steps_after_warmup(total_steps, 0), end_lr, power)
        super().__init__(optimizer, curve, last_epoch)


@final
class PolynomialWarmupLR(Schedule):
    r"""Warm up in a straight line, then decay to ``end_lr`` along a power of the remaining fraction of steps.

    .. math::
        \eta_k = b \frac{k + 1}{w + 1} \; (k < w), \qquad
        \eta_k = e + (b - e) \left(1 - \frac{k - w}{T - w}\right)^p \; (w \le k \le T)

    with :math:`w` = ``warmup_steps``, :math:`T` = ``total_steps``, :math:`e` = ``end_lr`` and :math:`p` = ``power``;
    held afterwards. Source of the decay: Chen et al., "DeepLab", arXiv:1606.00915.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, the warm-up included.
        warmup_steps: Steps of the warm-up, below ``total_steps``.
        end_lr: The final rate, not above any base rate.
        power: The exponent, above 0. One gives a straight line.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: A count of steps does not fit, ``power`` is not above 0, or ``end_lr`` is above a base rate.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import PolynomialWarmupLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = PolynomialWarmupLR(optimizer, total_steps=5, warmup_steps=3)
        >>> [f"{rate:.2f}" for rate in scheduler.get_last_lr()]
        ['0.20']
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 1e-4,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        curve = _polynomial(optimizer, steps_after_warmup(total_steps, warmup_steps), end_lr, power)
        super().__init__(optimizer, WarmUp(warmup_steps, curve), last_epoch)
