"""Rates that end in half a cosine, at once or after a constant part, with and without a warm-up."""

from typing import final

from torch.optim import Optimizer

from colossal._src.nn.lr_scheduler.curve import Cosine, Hold, WarmUp
from colossal._src.nn.lr_scheduler.schedule import Schedule, check_final_lr, check_fraction, steps_after_warmup


@final
class CosineAnnealingLR(Schedule):
    r"""Follow half a cosine from the base rate down to ``eta_min``.

    .. math:: \eta_k = \eta_{min} + (b - \eta_{min}) \frac{1 + \cos(\pi k / T)}{2}, \quad 0 \le k \le T

    with the base rate :math:`b` and :math:`T` = ``total_steps``. The rate stays at ``eta_min`` afterwards: there is no
    restart. Source: Loshchilov and Hutter, "SGDR", arXiv:1608.03983.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps until ``eta_min`` is reached, at least 1.
        eta_min: The final rate, not above any base rate.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: ``total_steps`` is below 1, or ``eta_min`` is negative or above a base rate.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import CosineAnnealingLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = CosineAnnealingLR(optimizer, total_steps=2)
        >>> for _ in range(2):
        ...     optimizer.step()
        ...     scheduler.step()
        ...     print(f"{scheduler.get_last_lr()[0]:.2f}")
        0.40
        0.00
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1) -> None:
        curve = Cosine(steps_after_warmup(total_steps, 0), check_final_lr("eta_min", eta_min, optimizer))
        super().__init__(optimizer, curve, last_epoch)


@final
class CosineAnnealingWarmupLR(Schedule):
    r"""Warm up in a straight line, then follow half a cosine down to ``eta_min``.

    .. math::
        \eta_k = b \frac{k + 1}{w + 1} \; (k < w), \qquad
        \eta_k = \eta_{min} + (b - \eta_{min}) \frac{1 + \cos(\pi (k - w) / (T - w))}{2} \; (w \le k \le T)

    with :math:`w` = ``warmup_steps`` and :math:`T` = ``total_steps``; held afterwards. Sources: Loshchilov and Hutter,
    "SGDR", arXiv:1608.03983; Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, the warm-up included.
        warmup_steps: Steps of the warm-up, below ``total_steps``.
        eta_min: The final rate, not above any base rate.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: A count of steps does not fit, or ``eta_min`` is negative or above a base rate.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=5, warmup_steps=3)
        >>> [f"{rate:.2f}" for rate in scheduler.get_last_lr()]
        ['0.20']
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        cosine = Cosine(steps_after_warmup(total_steps, warmup_steps), check_final_lr("eta_min", eta_min, optimizer))
        super().__init__(optimizer, WarmUp(warmup_steps, cosine), last_epoch)


def _hold_then_cosine(steps: int, pct_start: float, eta_min: float) -> Hold:
    hold_steps = int(steps * check_fraction("pct_start", pct_start))
    return Hold(hold_steps, Cosine(steps - hold_steps, eta_min))


@final
class FlatAnnealingLR(Schedule):
    r"""Keep the base rate for a fraction of the steps, then follow half a cosine down to zero.

    .. math::
        \eta_k = b \; (k < f), \qquad
        \eta_k = b \frac{1 + \cos(\pi (k - f) / (T - f))}{2} \; (f \le k \le T), \qquad
        f = \lfloor T \cdot pct\_start \rfloor

    with the base rate :math:`b` and :math:`T` = ``total_steps``; held afterwards. Source of the annealing: Loshchilov
    and Hutter, "SGDR", arXiv:1608.03983.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, at least 1.
        pct_start: Fraction of the steps with a constant rate, strictly between 0 and 1.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: ``total_steps`` is below 1, or ``pct_start`` is not between 0 and 1.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import FlatAnnealingLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = FlatAnnealingLR(optimizer, total_steps=4, pct_start=0.5)
        >>> for _ in range(4):
        ...     optimizer.step()
        ...     scheduler.step()
        ...     print(f"{scheduler.get_last_lr()[0]:.2f}")
        0.80
        0.80
        0.40
        0.00
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, _hold_then_cosine(steps_after_warmup(total_steps, 0), pct_start, 0.0), last_epoch)


@final
class FlatAnnealingWarmupLR(Schedule):
    r"""Warm up in a straight line, keep the base rate for a while, then follow half a cosine down to ``eta_min``.

    .. math::
        \eta_k = b \frac{k + 1}{w + 1} \; (k < w), \qquad \eta_k = b \; (w \le k < w + f), \qquad
        \eta_k = \eta_{min} + (b - \eta_{min}) \frac{1 + \cos(\pi (k - w - f) / (T - w - f))}{2} \; (w + f \le k \le T)

    with :math:`w` = ``warmup_steps``, :math:`T` = ``total_steps`` and
    :math:`f = \lfloor (T - w) \cdot pct\_start \rfloor`: ``pct_start`` is a fraction of the steps after the warm-up.
    Held afterwards. Source of the annealing: Loshchilov and Hutter, "SGDR", arXiv:1608.03983.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, the warm-up included.
        warmup_steps: Steps of the warm-up, below ``total_steps``.
        pct_start: Fraction of the steps after the warm-up with a constant rate, strictly between 0 and 1.
        eta_min: The final rate, not above any base rate.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: A count of steps, ``pct_start`` or ``eta_min`` does not fit.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import FlatAnnealingWarmupLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = FlatAnnealingWarmupLR(optimizer, total_steps=11, warmup_steps=1, pct_start=0.5)
        >>> [f"{rate:.2f}" for rate in scheduler.get_last_lr()]
        ['0.40']
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
    ) -> None:
        steps = steps_after_warmup(total_steps, warmup_steps)
        flat = _hold_then_cosine(steps, pct_start, check_final_lr("eta_min", eta_min, optimizer))
        super().__init__(optimizer, WarmUp(warmup_steps, flat), last_epoch)
