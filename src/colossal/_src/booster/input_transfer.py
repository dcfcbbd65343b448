"""What a boosted model is called with, on an accelerator: tensors in host memory go where the model is."""

from collections.abc import Mapping
from typing import Any

import torch

from colossal._src.interface import ModelWrapper
from colossal._src.pipeline import map_tensors, tensors_in
from colossal.accelerator import Accelerator


def move_inputs(model: ModelWrapper, accelerator: Accelerator) -> None:
    """Move the inputs of a model from host memory to its device, as `Booster.execute_pipeline` does.

    What torch itself does here depends on the wrapper and on the device: FSDP moves inputs on some accelerators, DDP
    with `device_ids`, other models never. So it is done before all of them. Labels that the model does not get are
    for the program to move.
    """
    model.register_forward_pre_hook(
        lambda _, *inputs: _moved(accelerator.get_current_device(), *inputs), with_kwargs=True
    )


def _moved(
    device: torch.device, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
    if not any(tensor.is_cpu for tensor in tensors_in((args, kwargs))):
        return None
    return map_tensors((args, dict(kwargs)), lambda tensor: tensor.to(device, non_blocking=True))
