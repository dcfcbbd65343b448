"""What the callers of a process group ask for, in torch's ways of saying it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from colossal._src.comm._shm.engine import DTYPES, OTHER_REDUCTIONS, REDUCTIONS

_NUMBERS = frozenset(DTYPES)
_SUM, _MEAN = REDUCTIONS.index("sum"), REDUCTIONS.index("avg")
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
    reduction = given.reduceOp
    return _SUM if reduction == dist.ReduceOp.SUM else _REDUCTIONS[reduction.op]  # a lookup costs as much as a call


def native_reduction(given: Any, tensor: torch.Tensor) -> int | None:
    """Return the number of a reduction that the library can do; None for what is left to gloo."""
    number = reduction_number(given)
    if number >= len(REDUCTIONS) or tensor.dtype not in _NUMBERS or tensor.layout is not torch.strided:
        return None
    return None if number == _MEAN and not tensor.is_floating_point() else number
