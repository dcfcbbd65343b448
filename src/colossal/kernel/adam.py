"""One step of Adam over many tensors in host memory, in one pass over them."""

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import torch

from colossal._native import library
from colossal.errors import ShapeError, UnsupportedError

_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_WIDEST_VECTORS = 2


@final
@dataclass(frozen=True)
class AdamTensors:
    """A parameter and what belongs to it, each contiguous, on the CPU and of the same number of elements.

    Args:
        param: The parameter, in float32, bfloat16 or float16.
        grad: Its gradient, in any of these.
        exp_avg: The mean of the gradients, in float32.
        exp_avg_sq: The mean of their squares, in float32.
        copy: Where to write the new parameter as well, in any of these; nowhere by default.

    Example:
        >>> import torch
        >>> from colossal.kernel import AdamTensors
        >>> AdamTensors(*(torch.zeros(2) for _ in range(4))).copy is None
        True
    """

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None = None


@final
@dataclass(frozen=True)
class AdamStep:
    """The numbers of one step, which all its tensors share.

    Args:
        step: The number of this step, from 1.
        lr: The learning rate.
        betas: The shares that the means keep.
        eps: Added to the root of the mean of squares.
        weight_decay: How much of the parameter is taken away (times `lr`), or added to the gradient.
        is_decoupled: The former, as in AdamW; if not the latter, as in Adam.
        bias_correction: Whether the means are corrected for having begun at zero.
        grad_scale: What the gradients are multiplied with: undoes a loss scale, and clips.

    Example:
        >>> from colossal.kernel import AdamStep
        >>> AdamStep(step=1, lr=0.5, betas=(0.5, 0.75)).step_size
        1.0
    """

    step: int
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    is_decoupled: bool = True
    bias_correction: bool = True
    grad_scale: float = 1.0

    @property
    def step_size(self) -> float:
        """The learning rate over the correction of the mean."""
        return self.lr / (1 - self.betas[0] ** self.step) if self.bias_correction else self.lr

    @property
    def root_of_correction(self) -> float:
        """The root of the correction of the mean of squares."""
        return math.sqrt(1 - self.betas[1] ** self.step) if self.bias_correction else 1.0


class _Tensor(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("param", "grad", "exp_avg", "exp_avg_sq", "copy")),
        ("numel", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("param_type", "grad_type", "copy_type", "padding")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_float) for name in ("step_size", "beta1", "beta2", "rest1", "rest2", "eps")),
        *((name, ctypes.c_float) for name in ("decay", "root_of_correction", "grad_scale")),
        ("is_decoupled", ctypes.c_int32),
    )


def adam_step(tensors: Iterable[AdamTensors], step: AdamStep, num_threads: int | None = None) -> None:
    """Update parameters and their means, in place.

    It computes in float32 whatever the parameters and gradients are, and reads and writes each of them once: unscaling,
    clipping, weight decay, the update and the copy in another precision take no passes of their own. Without a compiler
    torch's operations do the same, in several passes.

    Args:
        tensors: The parameters, with all that belongs to them.
        step: The numbers of the step.
        num_threads: How many threads share the work; as many as torch uses by default.

    Raises:
        ShapeError: Tensors that belong together differ in size, or lie elsewhere or otherwise than they must.

    Source: Kingma, Ba, "Adam", 2014, https://arxiv.org/abs/1412.6980; Loshchilov, Hutter, "Decoupled Weight Decay
    Regularization", 2017, https://arxiv.org/abs/1711.05101.

    Example:
        >>> import torch
        >>> from colossal.kernel import AdamStep, AdamTensors, adam_step
        >>> param, grad, exp_avg, exp_avg_sq = torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(2)
        >>> adam_step([AdamTensors(param, grad, exp_avg, exp_avg_sq)], AdamStep(step=1, lr=0.5))
        >>> param
        tensor([0.5000, 0.5000])
    """
    checked = [_checked(one) for one in tensors]
    _implementation()(checked, step, num_threads or torch.get_num_threads())


def reference_adam_step(tensors: Sequence[AdamTensors], step: AdamStep, _num_threads: int = 1) -> None:
    """Do what `adam_step` does with torch's operations.

    Args:
        tensors: The parameters, with all that belongs to them.
        step: The numbers of the step.

    Example:
        >>> import torch
        >>> from colossal.kernel import AdamStep, AdamTensors
        >>> from colossal.kernel.adam import reference_adam_step
        >>> tensors = AdamTensors(torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1))
        >>> reference_adam_step([tensors], AdamStep(step=1, lr=0.5))
        >>> tensors.param
        tensor([0.5000])
    """
    beta1, beta2 = step.betas
    for one in tensors:
        param, grad = one.param.detach().float(), one.grad.float() * step.grad_scale
        if not step.is_decoupled:
            grad = grad.add(param, alpha=step.weight_decay)
        else:
            param = param * (1 - step.lr * step.weight_decay)
        one.exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        one.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = one.exp_avg_sq.sqrt().div_(step.root_of_correction).add_(step.eps)
        param = param.addcdiv(one.exp_avg, root, value=-step.step_size)
        one.param.detach().copy_(param)
        if one.copy is not None:
            one.copy.detach().copy_(param)


@cache
def _implementation() -> Callable[[Sequence[AdamTensors], AdamStep, int], None]:
    try:
        function = library("cpu/adam").colossal_adam
    except UnsupportedError:
        return reference_adam_step
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    function.restype = None

    def run(tensors: Sequence[AdamTensors], step: AdamStep, num_threads: int, level: int = _WIDEST_VECTORS) -> None:
        table = (_Tensor * len(tensors))(*map(_row, tensors))
        decay = step.weight_decay * (step.lr if step.is_decoupled else 1.0)
        rests = (1 - beta for beta in step.betas)
        means = (step.step_size, *step.betas, *rests, step.eps)
        numbers = _Step(*means, decay, step.root_of_correction, step.grad_scale, step.is_decoupled)
        function(table, len(tensors), ctypes.byref(numbers), num_threads, level)

    return run


def _row(one: AdamTensors) -> _Tensor:
    copy = one.copy
    return _Tensor(
        one.param.data_ptr(),
        one.grad.data_ptr(),
        one.exp_avg.data_ptr(),
        one.exp_avg_sq.data_ptr(),
        None if copy is None else copy.data_ptr(),
        one.param.numel(),
        _TYPES[one.param.dtype],
        _TYPES[one.grad.dtype],
        0 if copy is None else _TYPES[copy.dtype],
    )


def _checked(one: AdamTensors) -> AdamTensors:
    tensors = {name: getattr(one, name) for name in one.__dataclass_fields__}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        dtypes = (torch.float32,) if name.startswith("exp_avg") else tuple(_TYPES)
        fits = tensor.numel() == one.param.numel() and tensor.dtype in dtypes
        if not (fits and tensor.device.type == "cpu" and tensor.is_contiguous()):
            raise ShapeError(
                f"The {name} of a step of Adam is a contiguous tensor of {one.param.numel()} elements on the CPU, in "
                f"{' or '.join(map(str, dtypes))}. Found {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
                f"{'' if tensor.is_contiguous() else ', not contiguous'}. Convert it."
            )
    return one
