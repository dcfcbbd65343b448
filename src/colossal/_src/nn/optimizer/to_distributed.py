"""Converts a plain optimizer to its distributed counterpart."""

from typing import Any

from torch.optim import Optimizer

from colossal._src.nn.optimizer.adafactor import Adafactor, DistributedAdaFactor
from colossal._src.nn.optimizer.came import CAME, DistributedCAME
from colossal._src.nn.optimizer.galore import DistGaloreAwamW, GaLoreAdamW, GaLoreAdamW8bit
from colossal._src.nn.optimizer.lamb import DistributedLamb, Lamb

_DISTRIBUTED_CLASSES: dict[type[Optimizer], Any] = {
    Adafactor: DistributedAdaFactor,
    CAME: DistributedCAME,
    GaLoreAdamW: DistGaloreAwamW,
    GaLoreAdamW8bit: DistGaloreAwamW,
    Lamb: DistributedLamb,
}


def cast_to_distributed(optim: Optimizer) -> Optimizer:
    """Convert an optimizer to its distributed counterpart, which has `setup_distributed`.

    Args:
        optim: Any optimizer.

    Returns:
        The counterpart, with the same groups and state, so that existing schedulers drive it; `optim` itself if it has
        none.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import Lamb, cast_to_distributed
        >>> type(cast_to_distributed(Lamb([torch.nn.Parameter(torch.ones(2))]))).__name__
        'DistributedLamb'
    """
    if type(optim) not in _DISTRIBUTED_CLASSES:
        return optim
    distributed = _DISTRIBUTED_CLASSES[type(optim)](optim.param_groups, **optim.defaults)
    distributed.state.update(optim.state)
    return distributed
