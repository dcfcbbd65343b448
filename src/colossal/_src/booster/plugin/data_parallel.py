"""What the plugins have in common whose ranks along the dp axis each see their own shard of the data."""

from typing import TYPE_CHECKING, ClassVar

import torch

from colossal._src.booster.plugin.base import Plugin
from colossal._src.checkpoint_io import CheckpointIO, ProcessGroupIO
from colossal._src.cluster import AXES, Axis, ParallelMesh, current_mesh
from colossal._src.tensor import DATA
from colossal.errors import ConfigError

if TYPE_CHECKING:
    from colossal._src.booster.lora import Lora


def check_device(device: torch.device, mesh: ParallelMesh) -> None:
    """Reject a model on a device other than that of the process group."""
    if device.type != mesh.accelerator.name:
        raise ConfigError(
            "The processes exchange gradients on the device that they were launched for, "
            f"{mesh.accelerator.name!r}. Found a model for {device.type!r}. Leave the device of the Booster out, "
            f"or launch with COLOSSAL_DEVICE={device.type}."
        )


class DataParallelPlugin(Plugin):
    """A plugin whose ranks compute gradients of different data, along the dp axis of the mesh."""

    _lora_axes: ClassVar[tuple[Axis, ...]] = (DATA,)  # whose ranks draw the same adapters

    @property
    def _keeps_full_weights(self) -> bool:
        """Whether a rank has unsharded weights, which can be quantized."""
        return True

    def _find_mesh(self) -> ParallelMesh:
        """Find the mesh of the ranks that train together."""
        return current_mesh()

    def get_checkpoint_io(self) -> CheckpointIO:
        """Make what reads and writes checkpoints.

        Returns:
            A checkpoint IO in which each rank writes and reads its shards, and all learn whether it succeeded.
        """
        return CheckpointIO(ProcessGroupIO())

    def get_lora(self) -> "Lora | None":
        """Make what adds low-rank adapters to models and saves them.

        Returns:
            A LoRA whose adapters start from the same values on all ranks, and that rank 0 writes. It quantizes weights
            only where no rank has a shard of them.

        Raises:
            ConfigError: No process group is initialized.
            MeshError: The sizes of the plugin do not fit the world size.
        """
        from colossal._src.booster.lora import Lora, quantize_with_bitsandbytes

        quantizer = quantize_with_bitsandbytes if self._keeps_full_weights else None
        return Lora(ProcessGroupIO(), self._lora_axes, quantizer, self._find_mesh())

    def mesh_and_axes_to_compare(self) -> tuple[ParallelMesh, tuple[Axis, ...]]:
        """Return which ranks have to boost the same.

        Returns:
            The mesh of the plugin, or else that in force, and all its axes.

        Raises:
            MeshError: No process group is initialized, or the sizes of the plugin do not fit its world size.
        """
        return self._find_mesh(), AXES

    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        """Return which shard of the data this rank sees.

        Returns:
            Its index on the dp axis, and the size of that axis.
        """
        mesh = self._find_mesh()
        return mesh.rank(DATA), mesh.size(DATA)
