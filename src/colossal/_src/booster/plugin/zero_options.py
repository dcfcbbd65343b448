"""The options of plugins with ZeRO: what is partitioned over data-parallel ranks, and how."""

from dataclasses import dataclass, replace
from typing import Self, final

import torch

from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.cluster import ParallelMesh
from colossal._src.interface import Clipping
from colossal._src.zero import Partitions, ZeroConfig
from colossal.errors import ConfigError

_DEFAULT = "fp16"
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}


@final
@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """The precision, and how states are partitioned over data-parallel ranks and gradients clipped."""

    plugin: str  # whose options these are
    # what the model is cast to: one of fp16, bf16, and fp32 for the dtype that it has; None for what `in_precision`
    # finds
    precision: str | None
    clipping: Clipping  # how gradients are clipped
    zero: ZeroConfig  # how gradients are reduced, and where states are
    extra_dp_size: int = 1  # number of blocks of ranks that hold the same shards
    cast_inputs: bool = True  # cast what goes into the model, and what comes out of it
    verbose: bool = False  # log each change of the loss scale

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in _DTYPES:
            raise ConfigError(
                f"{self.plugin} takes the precision {', '.join(map(repr, _DTYPES))}. Found precision="
                f"{self.precision!r}. Pass one of them."
            )
        if self.extra_dp_size < 1:
            raise ConfigError(
                f"There is at least one replica of the shards. Found extra_dp_size={self.extra_dp_size}. Pass 1 or "
                "more."
            )

    @property
    def dtype(self) -> torch.dtype | None:
        """What the model is cast to; None leaves it as it is."""
        return _DTYPES[self.precision or _DEFAULT]

    def partitions(self, mesh: ParallelMesh) -> Partitions:
        """Find the ranks over which the states of each parameter are partitioned."""
        return Partitions(mesh, self.zero.fp8_communication, self.extra_dp_size)

    def in_precision(self, chosen: MixedPrecision | None) -> Self:
        """Take the precision of the Booster, or of the plugin, or fp16."""
        if chosen is not None and self.precision not in (None, chosen.name):
            raise ConfigError(
                "One of the Booster and the plugin chooses the precision. Found "
                f"Booster(mixed_precision={chosen.name!r}) and {self.plugin}(precision={self.precision!r}). Leave out "
                "one of them."
            )
        return replace(self, precision=(self.precision or _DEFAULT) if chosen is None else chosen.name)
