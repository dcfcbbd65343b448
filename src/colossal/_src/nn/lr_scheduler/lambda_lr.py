"""Rates given by a function of the user."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from torch.optim import Optimizer

from colossal._src.nn.lr_scheduler.curve import Factor, Product
from colossal._src.nn.lr_scheduler.schedule import Schedule, per_group_values, steps_after_warmup
from colossal.errors import ConfigError

Function: TypeAlias = Callable[[int], float]


def _functions(lr_lambda: Function | Sequence[Function] | None, optimizer: Optimizer) -> list[Function]:
    functions = per_group_values("lr_lambda", lr_lambda, optimizer)
    if not all(callable(function) for function in functions):
        raise ConfigError(
            f"lr_lambda must be a function of the step, or a list with one per parameter group. Found {lr_lambda!r}. "
            "Pass, say, lr_lambda=lambda step: 0.95**step."
        )
    return functions


@final
class LambdaLR(Schedule):
    r"""Multiply the base rate by a function of the step.

    .. math:: \eta_k = b \, f(k), \quad 0 \le k \le T

    with the base rate :math:`b`, :math:`f` = ``lr_lambda`` and :math:`T` = ``total_steps``; held afterwards. The
    function is not saved in the state: build the schedule with it again before loading a state. Source:
    :class:`torch.optim.lr_scheduler.LambdaLR`.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, at least 1.
        lr_lambda: A function from the step to the factor, or a list with one per parameter group.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: ``total_steps`` is below 1, or ``lr_lambda`` is missing, not a function, or a list of the wrong
            length.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import LambdaLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = LambdaLR(optimizer, total_steps=10, lr_lambda=lambda step: 1 / (1 + step))
        >>> optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.4]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        lr_lambda: Function | Sequence[Function] | None = None,
        last_epoch: int = -1,
    ) -> None:
        steps = steps_after_warmup(total_steps, 0)
        super().__init__(
            optimizer, [Factor(steps, function) for function in _functions(lr_lambda, optimizer)], last_epoch
        )


@final
class MultiplicativeLR(Schedule):
    r"""Multiply the rate of the step before by a function of the step.

    .. math:: \eta_k = b \prod_{i=1}^{k} f(i), \quad 0 \le k \le T

    with the base rate :math:`b`, :math:`f` = ``lr_lambda`` and :math:`T` = ``total_steps``; held afterwards. The
    function is not saved in the state, the product so far is: build the schedule with the function again before loading
    a state. Source: :class:`torch.optim.lr_scheduler.MultiplicativeLR`.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire schedule, at least 1.
        lr_lambda: A function from the step to the factor, or a list with one per parameter group. It is called once per
            step and never for step 0.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: ``total_steps`` is below 1, or ``lr_lambda`` is missing, not a function, or a list of the wrong
            length.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import MultiplicativeLR
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = MultiplicativeLR(optimizer, total_steps=10, lr_lambda=lambda step: 0.5)
        >>> for _ in range(2):
        ...     optimizer.step()
        ...     scheduler.step()
        >>> scheduler.get_last_lr()
        [0.2]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        lr_lambda: Function | Sequence[Function] | None = None,
        last_epoch: int = -1,
    ) -> None:
        steps = steps_after_warmup(total_steps, 0)
        super().__init__(
            optimizer, [Product(steps, function) for function in _functions(lr_lambda, optimizer)], last_epoch
        )
