"""Copies of boosted models, by which programs average weights and evaluate."""

from copy import deepcopy
from typing import Any, NoReturn, TypeVar

from torch import nn

from colossal._src.tensor import copy_placement
from colossal.errors import UnsupportedError

_Module = TypeVar("_Module", bound=nn.Module)


def copy_module(module: _Module, memo: dict[int, Any]) -> _Module:
    """Copy a module, whose parameters keep their placement; what is in `memo` already stands for its original."""
    copied = module.__class__.__new__(module.__class__)
    memo[id(module)] = copied
    vars(copied).update({name: deepcopy(value, memo) for name, value in vars(module).items()})
    for new, old in zip(copied.parameters(), module.parameters(), strict=True):
        copy_placement(new, old)
    return copied


def copy_refusal(where: str) -> str:
    """Say how to average weights that no rank has as tensors of its own."""
    return (
        "A copy of a model, such as torch.optim.swa_utils.AveragedModel makes, has parameters of its own. Found a "
        f"boosted model whose parameters are in {where}. Copy the model before boost, or keep full values: on all "
        "ranks state = model.state_dict(only_rank_0=False), and for an average of them after each step "
        "average[name].lerp_(value, 1 - decay) for each that is floating-point."
    )


def refuse_copy(where: str) -> NoReturn:
    """Refuse a copy of a model."""
    raise UnsupportedError(copy_refusal(where))
