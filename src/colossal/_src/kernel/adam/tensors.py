"""What a step of Adam reads and writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch

from colossal._src.kernel.adam.step import AdamStep
from colossal.errors import ShapeError

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


def check(columns: Columns) -> None:
    """Refuse tensors that a kernel, which knows addresses only, would take for something else."""
    lengths = [len(column) for column in columns]
    if lengths[:4] != lengths[:1] * 4 or lengths[4] not in (0, lengths[0]):
        raise ShapeError(
            "A step of Adam takes as many gradients and means as parameters, and as many copies or none. Found lists "
            f"of {', '.join(map(str, lengths))}. Make them equally long."
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
                    f"{tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}. Convert it."
                )
