"""Which parameters of a model GaLore projects."""

from typing import Any

from torch import nn

_NORMS = ("LayerNorm", "RMSNorm", "BatchNorm", "GroupNorm", "InstanceNorm")


def get_galore_param_groups(
    model: nn.Module,
    weight_decay: float,
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    proj_type: str = "std",
) -> list[dict[str, Any]]:
    """Sort the parameters of a model into those that GaLore projects, and others.

    Args:
        model: The model; its parameters that need no gradient are left out.
        weight_decay: For all but biases and the parameters of norms.
        rank: The number of dimensions that a gradient is projected onto.
        update_proj_gap: How many steps a subspace is kept.
        scale: What the updates of projected parameters are multiplied with.
        proj_type: Which side is projected: ``"std"`` for the shorter one, ``"reverse_std"``, ``"left"``, ``"right"``,
            or ``"full"`` for both.

    Returns:
        Three groups: matrices, which are projected; other parameters; and those without weight decay. A group without
        parameters is left out.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import get_galore_param_groups
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
        >>> groups = get_galore_param_groups(model, weight_decay=0.1, rank=2)
        >>> [(len(group["params"]), group.get("rank"), group["weight_decay"]) for group in groups]
        [(1, 2, 0.1), (1, None, 0.1), (4, None, 0.0)]
    """
    undecayed = {
        param
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if name.endswith("bias") or any(kind in type(module).__name__ for kind in _NORMS)
    }
    params = [param for param in model.parameters() if param.requires_grad]
    matrices = {param for param in params if param.dim() == 2} - undecayed  # noqa: PLR2004 (rows and columns)
    galore = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": proj_type}
    groups = [
        {"params": [param for param in params if param in matrices], "weight_decay": weight_decay} | galore,
        {"params": [param for param in params if param not in matrices | undecayed], "weight_decay": weight_decay},
        {"params": [param for param in params if param in undecayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
