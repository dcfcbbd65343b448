"""Optimizers that would be wrong on parts of a model."""

from torch.optim import Optimizer

from colossal.cluster import ParallelMesh
from colossal.errors import UnsupportedError
from colossal.interface.elementwise import NOT_ELEMENTWISE, reason_against

_NOT_ON_STAGES = {"LBFGS": NOT_ELEMENTWISE["LBFGS"]}


def check_optimizer(optimizer: Optimizer, mesh: ParallelMesh) -> None:
    """Refuse optimizers that are wrong on parts of parameters, or on some of them.

    Args:
        optimizer: As the user built it.
        mesh: The mesh, whose tp axis divides parameters, and whose pp axis deals them out.

    Raises:
        UnsupportedError: It looks at more than one element at once.

    Example:
        >>> import torch
        >>> from colossal.booster.plugin.hybrid_optimizer import check_optimizer
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     check_optimizer(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), ParallelMesh(tp=2))
    """
    if mesh.size("tp") == 1 and mesh.size("pp") == 1:
        return
    reason = reason_against(optimizer, NOT_ELEMENTWISE if mesh.size("tp") > 1 else _NOT_ON_STAGES)
    if reason is not None:
        raise UnsupportedError(
            f"An optimizer of a divided model sees parts of it. Found {type(optimizer).__name__} with "
            f"tp_size={mesh.size('tp')} and pp_size={mesh.size('pp')}, which {reason}. Take one that works by element, "
            "such as torch.optim.AdamW or colossal.nn.optimizer.HybridAdam, or LowLevelZeroPlugin."
        )
