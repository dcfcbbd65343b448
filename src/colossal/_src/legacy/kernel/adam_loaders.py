"""The kernel of Adam by the names and in the order of arguments of the older extensions."""

from collections.abc import Sequence
from typing import final

import torch

from colossal._src.kernel import AdamStep, AdamTensors, adam_step
from colossal._src.legacy.notice import superseded
from colossal.errors import UnsupportedError

_SUCCESSOR = "colossal.kernel.adam_step(tensors, AdamStep(...))"


@final
class CPUAdamOptimizer:
    """Adam for one flat parameter after another, in host memory; `CPUAdamLoader` loads it.

    Args:
        lr: The learning rate; each step has its own.
        beta1: Decay rate of the mean of gradients; each step has its own.
        beta2: Decay rate of the mean of their squares; each step has its own.
        eps: Added to the root of the latter; each step has its own.
        weight_decay: Weight decay; each step has its own.
        adamw_mode: Whether it is decoupled, as in AdamW.
    """

    def __init__(
        self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, adamw_mode: bool
    ) -> None:
        AdamStep(1, lr, (beta1, beta2), eps, weight_decay)
        self._is_decoupled = bool(adamw_mode)

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        param: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        div_scale: float = -1.0,
    ) -> None:
        """Update a parameter and its means, in place.

        Args:
            step: The number of this step, from 1.
            lr: The learning rate.
            beta1: Decay rate of the mean of gradients.
            beta2: Decay rate of the mean of their squares.
            eps: Added to the root of the latter.
            weight_decay: Weight decay.
            bias_correction: Whether the means are corrected for their initialization with zero.
            param: The parameter.
            grad: Its gradient.
            exp_avg: The mean of its gradients.
            exp_avg_sq: The mean of their squares.
            div_scale: What the gradient is divided by; nothing if it is not positive.

        Raises:
            ShapeError: The tensors differ in size, or one is not contiguous.
        """
        numbers = AdamStep(
            step,
            lr,
            (beta1, beta2),
            eps,
            weight_decay,
            self._is_decoupled,
            bool(bias_correction),
            1 / div_scale if div_scale > 0 else 1.0,
        )
        _step([param], [grad], [exp_avg], [exp_avg_sq], numbers)


@final
class CPUAdamExtension:
    """What `CPUAdamLoader` loads."""

    CPUAdamOptimizer = CPUAdamOptimizer


@final
class FusedOptimizerExtension:
    """What `FusedOptimizerLoader` loads."""

    @staticmethod
    def multi_tensor_adam(
        chunk_size: int,
        overflow_buf: torch.Tensor,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
        div_scale: float = -1.0,
    ) -> None:
        """Update parameters and their means, in place; an operator for `multi_tensor_applier`.

        Args:
            chunk_size: Not needed: the kernel takes any number of elements.
            overflow_buf: Not needed: whoever scales a loss decides about the step.
            tensor_lists: Gradients, parameters, means of gradients and means of their squares.
            lr: The learning rate.
            beta1: Decay rate of the mean of gradients.
            beta2: Decay rate of the mean of their squares.
            eps: Added to the root of the latter.
            step: The number of this step, from 1.
            mode: 1 for decoupled weight decay, as in AdamW; 0 for Adam.
            bias_correction: Whether the means are corrected for their initialization with zero.
            weight_decay: Weight decay.
            div_scale: What gradients are divided by; nothing if it is not positive.

        Raises:
            ShapeError: Tensors that belong together differ in size, or one is not contiguous.
        """
        del chunk_size, overflow_buf
        scale = 1 / div_scale if div_scale > 0 else 1.0
        numbers = AdamStep(step, lr, (beta1, beta2), eps, weight_decay, bool(mode), bool(bias_correction), scale)
        grads, params, means, squares = tensor_lists
        _step(params, grads, means, squares, numbers)

    def __getattr__(self, name: str) -> object:
        raise UnsupportedError(
            f"FusedOptimizerLoader loads multi_tensor_adam, the only one that programs share with the library. Found "
            f"{name!r}. Use FusedSGD or FusedLAMB of colossal.nn.optimizer, or torch._foreach_* for scales and norms."
        )


class _KernelLoader:
    """Loads a kernel; it is built when it first runs."""

    def __init__(self) -> None:
        superseded(f"colossal.kernel.kernel_loader.{type(self).__name__}", _SUCCESSOR)


@final
class CPUAdamLoader(_KernelLoader):
    """Loads the kernel of Adam for parameters in host memory.

    Example:
        >>> import torch
        >>> from colossal.legacy.kernel import CPUAdamLoader
        >>> adam = CPUAdamLoader().load().CPUAdamOptimizer(0.5, 0.9, 0.999, 1e-8, 0.0, True)
        >>> param, grad, mean, square = torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2)
        >>> adam.step(1, 0.5, 0.9, 0.999, 1e-8, 0.0, True, param, grad, mean, square)
        >>> param
        tensor([0.5000, 0.5000])
    """

    def load(self) -> type[CPUAdamExtension]:
        """Load the kernel.

        Returns:
            An object with the class `CPUAdamOptimizer`.
        """
        return CPUAdamExtension


@final
class FusedOptimizerLoader(_KernelLoader):
    """Loads the kernel of Adam for many tensors, on the device that they are on.

    Example:
        >>> from colossal.legacy.kernel import FusedOptimizerLoader
        >>> FusedOptimizerLoader().load().multi_tensor_adam.__name__
        'multi_tensor_adam'
    """

    def load(self) -> FusedOptimizerExtension:
        """Load the kernel.

        Returns:
            An object with the function `multi_tensor_adam`.
        """
        return FusedOptimizerExtension()


def _step(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
    squares: Sequence[torch.Tensor],
    numbers: AdamStep,
) -> None:
    """Take a step; means in half precision, which the kernel does not have, are computed in float32 and rounded."""
    wide = [[each.float() for each in both] for both in (means, squares)]
    adam_step(map(AdamTensors, params, grads, *wide), numbers)
    for narrow, found in zip((*means, *squares), (*wide[0], *wide[1]), strict=True):
        if narrow is not found:
            narrow.copy_(found)
