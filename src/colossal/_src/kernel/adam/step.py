"""The numbers of one step of Adam."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch

from colossal.errors import ShapeError


@final
@dataclass(frozen=True)
class AdamStep:
    """The hyperparameters of one step, the same for all its tensors.

    Args:
        step: The number of this step, from 1.
        lr: The learning rate.
        betas: The decay rates of the first and second moments.
        eps: Added to the root of the second moment.
        weight_decay: How much of the parameter is taken away (times `lr`), or added to the gradient.
        is_decoupled: The former, as in AdamW; if not the latter, as in Adam.
        bias_correction: Whether the moments are corrected for their initialization with zero.
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


Columns: TypeAlias = Sequence[Sequence[torch.Tensor]]
"""Parameters, gradients, means, means of squares, and copies: either none, or one for each parameter."""

Runner: TypeAlias = Callable[[Columns, AdamStep, int], None]
"""Takes a step with some number of threads, of which 0 means as many as torch uses."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = ("param", "grad", "exp_avg", "exp_avg_sq", "copy")
_DTYPES = (FLOATS, FLOATS, FLOATS[:1], FLOATS[:1], FLOATS)


@final
@dataclass(frozen=True)
class AdamTensors:
    """A parameter and what belongs to it, each contiguous, on the same device and of the same number of elements.

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


def check_columns(columns: Columns) -> None:
    """Refuse tensors that a kernel, which knows addresses only, would take for something else."""
    lengths = [len(column) for column in columns]
    if lengths[:4] != lengths[:1] * 4 or lengths[4] not in (0, lengths[0]):
        raise ShapeError(
            "A step of Adam takes as many gradients and means as parameters, and as many copies or none. Found lists "
            f"of {', '.join(map(str, lengths))}. Pass one of each for each parameter, or no copies."
        )
    device = columns[0][0].device
    numels = [param.numel() for param in columns[0]]
    for column, name, dtypes in zip(columns, _NAMES, _DTYPES, strict=True):
        for tensor, numel in zip(column, numels, strict=False):
            fits = tensor.numel() == numel and tensor.dtype in dtypes and tensor.device == device
            if not (fits and tensor.is_contiguous()):
                raise ShapeError(
                    f"The {name} of a step of Adam is a contiguous tensor of {numel} elements on {device}, in "
                    f"{' or '.join(map(str, dtypes))}. Found {tuple(tensor.shape)} in {tensor.dtype} on "
                    f"{tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}. Pass one as large as the "
                    f"parameter, after .to('{device}', {dtypes[0]}).contiguous()."
                )
