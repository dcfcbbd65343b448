"""Where a model may be."""

import torch

from colossal._src.cluster import ParallelMesh
from colossal.errors import ConfigError


def check_device(device: torch.device, mesh: ParallelMesh) -> None:
    """Reject a model on a device other than that of the process group."""
    if device.type != mesh.accelerator.name:
        raise ConfigError(
            "The processes exchange gradients on the device that they were launched for, "
            f"{mesh.accelerator.name!r}. Found a model for {device.type!r}. Leave the device of the Booster out, "
            f"or launch with COLOSSAL_DEVICE={device.type}."
        )
