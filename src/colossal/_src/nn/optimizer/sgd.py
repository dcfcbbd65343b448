"""Stochastic gradient descent by operations on many tensors at once."""

from typing import Any, final

import torch
from torch.optim.optimizer import ParamsT

from colossal._src.nn.optimizer.checked_optimizer import CheckedOptimizer, state_dtype
from colossal._src.tensor import copy_placement, local_of
from colossal.errors import ConfigError


@final
class FusedSGD(CheckedOptimizer):
    """Stochastic gradient descent with momentum; each operation runs over all parameters of a group.

    The momentum of parameters in half precision is float32.

    Args:
        params: Parameters, named parameters, or parameter groups.
        lr: The learning rate.
        momentum: The momentum factor.
        dampening: The fraction of the gradient that does not enter the momentum, after the first step.
        weight_decay: The decay of the parameter that is added to the gradient.
        nesterov: Use Nesterov momentum.
        wd_after_momentum: Apply weight decay to the update instead of the gradient, so that momentum does not see it.

    Raises:
        ConfigError: An argument is out of its range, or `nesterov` is set without momentum or with dampening.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013,
    https://proceedings.mlr.press/v28/sutskever13.html.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import FusedSGD
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = FusedSGD([weight], lr=0.5, momentum=0.5)
        >>> for _ in range(2):
        ...     weight.grad = torch.tensor([1.0, -1.0])
        ...     optimizer.step()
        >>> weight.data
        tensor([-1.2500,  1.2500])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        if nesterov and (not momentum or dampening):
            raise ConfigError(
                f"Nesterov's way needs momentum and no dampening. Found momentum={momentum} and "
                f"dampening={dampening}. Pass, say, momentum=0.9 and dampening=0, or leave nesterov out."
            )
        numbers = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, numbers | {"nesterov": nesterov, "wd_after_momentum": wd_after_momentum})

    def _update(self) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update_group(group, params)

    def _update_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        grads = [local_of(param.grad) for param in params if param.grad is not None]
        # copies, which are changed in place below; the gradients stay as they are
        updates = [grad.to(state_dtype(param), copy=True) for grad, param in zip(grads, params, strict=True)]
        values = [local_of(param) for param in params]
        if decay and not group["wd_after_momentum"]:
            torch._foreach_add_(updates, values, alpha=decay)
        if momentum:
            moved = self._moved(params, updates, momentum, 1 - group["dampening"])
            if group["nesterov"]:
                torch._foreach_add_(updates, moved, alpha=momentum)
            else:
                torch._foreach_copy_(updates, moved)
        if decay and group["wd_after_momentum"]:
            torch._foreach_add_(updates, values, alpha=decay)
        torch._foreach_add_(values, updates, alpha=-float(group["lr"]))

    def _moved(
        self, params: list[torch.Tensor], updates: list[torch.Tensor], momentum: float, decay: float
    ) -> list[torch.Tensor]:
        """The momenta with the updates in them; the first update of a parameter is its momentum."""
        moved, olds = [], []
        for param, update in zip(params, updates, strict=True):
            state = self.state[param]
            is_new = "momentum_buffer" not in state
            if is_new:
                state["momentum_buffer"] = copy_placement(torch.zeros_like(param.detach(), dtype=update.dtype), param)
                local_of(state["momentum_buffer"]).copy_(update)
            elif state["momentum_buffer"].dtype != update.dtype:  # somebody cast it as torch does
                state["momentum_buffer"] = copy_placement(state["momentum_buffer"].to(update.dtype), param)
            moved.append(local_of(state["momentum_buffer"]))
            olds += [] if is_new else [(moved[-1], update)]
        if olds:
            torch._foreach_mul_([buffer for buffer, _ in olds], momentum)
            torch._foreach_add_([buffer for buffer, _ in olds], [update for _, update in olds], alpha=decay)
        return moved
