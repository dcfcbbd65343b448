"""Optimizers that are wrong on shards of tensor-parallel layers."""

from collections.abc import Mapping

from torch.optim import Optimizer

from colossal.errors import UnsupportedError
from colossal.tensor import tensor_part_of

# Optimizers that treat each element by itself need not know of shards. These look at more than one: all such of
# torch.optim, and those of colossal.nn.optimizer, which know ZeRO's shards and DTensors only.
NOT_ELEMENTWISE: Mapping[str, str] = {
    "Adafactor": "keeps sums over rows and columns of whole matrices",
    "LBFGS": "takes inner products over all parameters",
    "Muon": "multiplies whole matrices",
    "SparseAdam": "takes sparse gradients",
    "SummingOptimizer": "takes sums over whole parameters",
}
"""Names of classes, and why they need whole parameters."""


def reason_against(optimizer: Optimizer, names: Mapping[str, str] = NOT_ELEMENTWISE) -> str | None:
    """Tell why an optimizer needs whole parameters.

    Args:
        optimizer: As the user built it.
        names: The classes to look for, and their reasons.

    Returns:
        The reason; None if it updates each element by itself, or is somebody else's.

    Example:
        >>> import torch
        >>> from colossal.interface.elementwise import reason_against
        >>> reason_against(torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))]))
        'takes inner products over all parameters'
    """
    kinds = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith(("torch.optim", "colossal.nn")))
    return next((names[kind.__name__] for kind in kinds if kind.__name__ in names), None)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would compute another update from the shards of tensor-parallel layers.

    Args:
        optimizer: Its groups hold the parameters, or shards or float32 copies of them.

    Raises:
        UnsupportedError: It needs whole parameters, and tensor parallelism divides one.

    Example:
        >>> import torch
        >>> from colossal.interface.elementwise import check_optimizer
        >>> check_optimizer(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    """
    reason = reason_against(optimizer)
    if reason is None:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    part = next((part for part in map(tensor_part_of, parameters) if part is not None), None)
    if part is not None:
        raise UnsupportedError(
            "The layers of colossal.nn keep shards of their parameters where the mesh has a tp axis. Found "
            f"{type(optimizer).__name__}, which {reason}, and a parameter of shape {part.layout.shape}, of which this "
            f"rank has {part.layout.local_shape(part.rank)}. Take an optimizer that works by element, such as "
            "torch.optim.AdamW or colossal.nn.optimizer.HybridAdam, or a mesh without tp."
        )
