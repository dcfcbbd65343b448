r"""Learning-rate schedules over a known number of steps.

Every schedule is a :class:`torch.optim.lr_scheduler.LRScheduler` that takes ``total_steps`` right after the optimizer.
Four rules hold for all of them:

* **Closed form.** The rate at step :math:`k` is a formula of :math:`k` and of the group's base rate :math:`b`. It never
  depends on the rate of the step before, so stepping, resuming and jumping agree.
* **Steps.** Step 0 is the rate right after construction; the :math:`k`-th call of ``step()`` sets the rate of step
  :math:`k`. After ``total_steps`` the rate of step ``total_steps`` is held.
* **Warm-up.** With ``warmup_steps`` = :math:`w > 0` the rate is :math:`b (k + 1) / (w + 1)` for :math:`k < w`; then the
  curve runs over the remaining ``total_steps - w`` steps, so that step :math:`w` has the full base rate.
* **State.** ``state_dict()`` holds plain numbers, strings and lists of them. Functions given by the user are not saved.

Build a schedule on the plain PyTorch optimizer, before :meth:`colossal.Booster.boost`.
"""

from colossal._src.nn.lr_scheduler.annealing import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
)
from colossal._src.nn.lr_scheduler.lambda_lr import LambdaLR, MultiplicativeLR
from colossal._src.nn.lr_scheduler.multistep import ExponentialLR, MultiStepLR, MultiStepWarmupLR, StepLR
from colossal._src.nn.lr_scheduler.onecycle import OneCycleLR
from colossal._src.nn.lr_scheduler.polynomial import LinearWarmupLR, PolynomialLR, PolynomialWarmupLR

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
]
