"""Mistakes that are found before anything is wrapped."""

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossal.errors import ConfigError
from colossal.interface import ModelWrapper, OptimizerWrapper


def check_parts(model: nn.Module, optimizer: Optimizer | None, lr_scheduler: LRScheduler | None) -> None:
    """Refuse parts that do not belong together, which would otherwise train silently wrong.

    Args:
        model: The user's model.
        optimizer: The optimizer of its parameters.
        lr_scheduler: The schedule of that optimizer.

    Raises:
        ConfigError: The model is boosted already, the optimizer holds parameters of another model, or the schedule
            belongs to another optimizer.
    """
    if isinstance(model, ModelWrapper) or isinstance(optimizer, OptimizerWrapper):
        raise ConfigError(
            "boost takes a plain model and a plain optimizer. Found one that is boosted already. "
            "Boost once; pass model.unwrap() and optimizer.unwrap() to boost again."
        )
    if optimizer is not None:
        own = set(model.parameters())
        strange = sum(parameter not in own for group in optimizer.param_groups for parameter in group["params"])
        if strange:
            raise ConfigError(
                f"The optimizer updates parameters of the model. Found {strange} that the model does not have. "
                "Build the optimizer from model.parameters()."
            )
    if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "The lr_scheduler drives the optimizer that is boosted with it. Found one that drives another. "
            "Build it from the optimizer that is passed to boost."
        )
