"""No parallelism: what a `Booster` without a plugin does."""

from typing import TYPE_CHECKING, final

import torch

from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin.base import Plugin, wrap_parts
from colossal._src.checkpoint_io import CheckpointIO, GeneralCheckpointIO, SingleProcessIO
from colossal._src.cluster import Axis, ParallelMesh, ambient_mesh
from colossal._src.interface import Boosted, Parts
from colossal._src.tensor import DATA

if TYPE_CHECKING:
    from colossal._src.booster.lora import Lora


@final
class SingleProcessPlugin(Plugin):
    """Trains in this process only, whether or not a process group is initialized."""

    supported_axes = (DATA, "tp")
    supported_precisions = ("fp16", "fp16_apex", "fp16_naive", "bf16", "fp8", "fp32")

    def configure(self, parts: Parts, device: torch.device, precision: MixedPrecision | None) -> Boosted:
        """Wrap the parts of a training program for this plugin."""
        return wrap_parts(parts, device, precision)

    def mesh_and_axes_to_compare(self) -> tuple[ParallelMesh | None, tuple[Axis, ...]]:
        """Return the ranks of tp, among which layers of `colossal.nn` are sharded; others may train what they like."""
        return ambient_mesh(), ("tp",)

    def get_checkpoint_io(self) -> CheckpointIO:
        """Return a checkpoint IO whose calling process writes."""
        return GeneralCheckpointIO()

    def get_lora(self) -> "Lora":
        """Return a LoRA whose calling process draws and writes for itself."""
        from colossal._src.booster.lora import Lora, quantize_with_bitsandbytes

        return Lora(SingleProcessIO(), quantizer=quantize_with_bitsandbytes)

    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        """Return 0 and 1: this process sees all data."""
        return 0, 1
