"""What the callers of a process group ask for, in torch's ways of saying it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from colossal.comm._shm.engine import DTYPES, OTHER_REDUCTIONS, REDUCTIONS

_NUMBERS = frozenset(DTYPES)
_MEAN = REDUCTIONS.index("avg")
_REDUCTIONS = {getattr(dist.ReduceOp, name.upper()): n for n, name in enumerate(REDUCTIONS + OTHER_REDUCTIONS)}


def options(given: Any, make: Callable[[], Any]) -> Any:
    """Return the options of a call; torch's own for a caller that gave none, or gave the reduction alone."""
    if given is None:
        return make()
    if isinstance(given, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        made = make()
        made.reduceOp = given
        return made
    return given


def as_list(tensors: Any) -> list[torch.Tensor]:
    """Return a list of tensors; a caller may give one alone."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def reduction_number(given: Any) -> int:
    """Return the number of a reduction, by which ranks compare theirs."""
    return _REDUCTIONS[given.reduceOp.op]


def own_reduction(given: Any, tensor: torch.Tensor) -> int | None:
    """Return the number of a reduction that the library can do; None for what is left to gloo."""
    number = reduction_number(given)
    is_mean_of_whole_numbers = number == _MEAN and not tensor.is_floating_point()
    is_ours = tensor.dtype in _NUMBERS and tensor.layout is torch.strided and not is_mean_of_whole_numbers
    return number if is_ours and number < len(REDUCTIONS) else None
