"""Optimizers that a program steps besides the boosted one, of parameters whose averaged gradients are elsewhere."""

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from colossal._src.interface import ModelWrapper, OptimizerWrapper, unwrap_model
from colossal._src.zero import ZeroShards
from colossal.errors import ConfigError


def refuse_other_optimizers(before: Iterable[nn.Parameter], model: ModelWrapper, optimizer: OptimizerWrapper) -> None:
    """Reject steps of other optimizers with parameters that boost replaced, or whose gradients nothing reduces.

    Args:
        before: The parameters of the model before it was boosted.
        model: The boosted model.
        optimizer: The boosted optimizer, for whose parameters alone ZeRO and Gemini reduce gradients.
    """
    there = set(unwrap_model(model).parameters())
    reduced = set(optimizer.masters.pairs.values()) if isinstance(optimizer.masters, ZeroShards) else there
    alone = WeakIdKeyDictionary({each: None for each in before if each not in there or each not in reduced})
    if alone:
        handle = register_optimizer_step_pre_hook(partial(_check, alone, WeakSet()))
        finalize(model, handle.remove)


def _check(alone: WeakIdKeyDictionary, seen: "WeakSet[Optimizer]", optimizer: Optimizer, *_step: Any) -> None:
    if optimizer in seen:
        return
    held: list[torch.Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
    if found := sum(each in alone for each in held):
        raise ConfigError(
            "Gradients are reduced over ranks for the boosted optimizer. Found a step of another one, "
            f"{type(optimizer).__name__}, with {found} parameters of the model that was boosted, which it would not "
            "train, or on the samples of each rank. Join the optimizers before boost, "
            "colossal.nn.optimizer.CombinedOptimizer, or take TorchDDPPlugin and no mixed precision with master "
            "weights, under which each may step."
        )
    seen.add(optimizer)
