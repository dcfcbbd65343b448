"""The options of `LowLevelZeroPlugin`, checked and sorted."""

from dataclasses import dataclass
from typing import final

import torch

from colossal.booster.mixed_precision import MixedPrecision
from colossal.cluster import ParallelMesh
from colossal.comm import Partition
from colossal.errors import ConfigError, MeshError, UnsupportedError
from colossal.zero import ZeroConfig

_DEFAULT = "fp16"
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}


@final
@dataclass(frozen=True)
class ZeroOptions:
    """What the user said, besides how the loss scale moves.

    Args:
        precision: What the model is cast to: one of fp16, bf16, and fp32 for the dtype that it has.
        max_norm: Clip the common norm of the gradients to it; 0 does not.
        norm_type: The p of that norm.
        replicas: Number of blocks of ranks that hold the same shards.
        cast_inputs: Cast what goes into the model, and what comes out of it.
        verbose: Log each change of the loss scale.
        zero: How gradients travel, and where states are.
        plugin: Whose options these are.

    Raises:
        ConfigError: A value is outside its range.
        UnsupportedError: Two values do not work together.
    """

    precision: str
    max_norm: float
    norm_type: float
    replicas: int
    cast_inputs: bool
    verbose: bool
    zero: ZeroConfig
    plugin: str = "LowLevelZeroPlugin"

    def __post_init__(self) -> None:
        if self.precision not in _DTYPES:
            raise ConfigError(
                f"{self.plugin} takes the precision {', '.join(map(repr, _DTYPES))}. Found precision="
                f"{self.precision!r}. Pass one of them."
            )
        if self.max_norm < 0 or not self.norm_type > 0:
            raise ConfigError(
                "Gradients are clipped to a norm of at least 0 (which does not clip), of a p greater than 0. Found "
                f"max_norm={self.max_norm} and norm_type={self.norm_type}. The defaults are 0.0 and 2.0."
            )
        if self.replicas < 1:
            raise ConfigError(
                f"There is at least one replica of the shards. Found extra_dp_size={self.replicas}. Pass 1 or more."
            )
        if self.precision == "fp16" and not self.zero.master_weights:
            raise UnsupportedError(
                "In fp16 gradients are scaled, and only float32 masters can hold them unscaled. Found "
                "master_weights=False with precision='fp16'. Leave it True, or pass precision='bf16'."
            )

    @property
    def dtype(self) -> torch.dtype | None:
        """What the model is cast to; None leaves it as it is."""
        return _DTYPES[self.precision]

    def partition(self, mesh: ParallelMesh) -> Partition:
        """Find the ranks that share states, and those that hold the same share.

        Args:
            mesh: The mesh in force.

        Raises:
            MeshError: The replicas do not divide the dp axis.
        """
        size = mesh.size("dp")
        if self.replicas == 1:
            return Partition(mesh.group("dp"))
        if size % self.replicas:
            raise MeshError(
                f"extra_dp_size divides the ranks of the dp axis. Found {self.replicas} for {size} ranks. Pass a "
                "divisor of their number, or leave it out."
            )
        return Partition(*mesh.blocks("dp", size // self.replicas))


def chosen_precision(own: str, chosen: MixedPrecision | None, plugin: str) -> str:
    """Take the precision of the Booster, if it has one, in the place of a plugin's.

    Args:
        own: The precision of the plugin.
        chosen: That of the Booster.
        plugin: The plugin's name.

    Returns:
        The name of the precision.

    Raises:
        ConfigError: Both were chosen, and they differ.

    Example:
        >>> from colossal.booster.mixed_precision import mixed_precision_factory
        >>> from colossal.booster.plugin.zero_options import chosen_precision
        >>> chosen_precision("fp16", mixed_precision_factory("bf16"), "LowLevelZeroPlugin")
        'bf16'
    """
    if chosen is not None and own not in (chosen.name, _DEFAULT):
        raise ConfigError(
            f"One of the Booster and the plugin chooses the precision. Found Booster(mixed_precision={chosen.name!r}) "
            f"and {plugin}(precision={own!r}). Leave out one of them."
        )
    return own if chosen is None else chosen.name


def refuse_fp8(fp8_communication: bool, use_fp8: bool) -> None:
    """Refuse options that nothing would honour.

    Raises:
        UnsupportedError: One of them is set.
    """
    for name, value, instead in (
        ("fp8_communication", fp8_communication, "communication_dtype=torch.bfloat16"),
        ("use_fp8", use_fp8, "precision='bf16', or TorchDDPPlugin with mixed_precision='fp8'"),
    ):
        if value:
            raise UnsupportedError(
                f"LowLevelZeroPlugin works in 16 and 32 bits. Found {name}=True, which is not built yet. The nearest "
                f"that works is {instead}."
            )
