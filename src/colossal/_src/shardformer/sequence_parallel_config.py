"""How sequences are sharded over ranks.

============  =====  =================================================================================================
mode          axis   what happens
============  =====  =================================================================================================
split_gather  tp     between attention and the linear layers each rank has some tokens: an all-reduce becomes an
                     all-gather before a column-parallel layer, and a reduce-scatter after a row-parallel one
ring          tp     the same, with the transfer of each rank's tokens overlapped with the product of others
all_to_all    sp     each rank has some tokens, and some heads of all tokens in attention
ring_attn     sp     each rank has some tokens, and the keys of others are passed around a ring in attention
============  =====  =================================================================================================
"""

from dataclasses import dataclass
from typing import Literal, final, get_args

from colossal._src.cluster import ParallelMesh
from colossal._src.nn.attention import SequenceSharding
from colossal.errors import ConfigError

SequenceMode = Literal["split_gather", "ring", "all_to_all", "ring_attn"]
"""How sequences are sharded over ranks."""

MODES_OF_TP: tuple[SequenceMode, ...] = ("split_gather", "ring")
"""Modes in which sequences are sharded over the same axis as tensors."""


@final
@dataclass(frozen=True)
class SequenceParallelConfig:
    """A mode of sequence parallelism, and how tokens are sharded.

    Args:
        mode: The mode.
        sharding: Which rank has which tokens.
        inner_ring_size: Of ring_attn, see `colossal.nn.attention.ring_attention`.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.shardformer import SequenceParallelConfig
        >>> from colossal.testing import fake_world
        >>> with fake_world(4):
        ...     sp_config = SequenceParallelConfig.of(None, ParallelMesh(sp=4), None)
        >>> sp_config.mode, sp_config.sharding.size, sp_config.is_over_tp
        ('all_to_all', 4, False)
    """

    mode: SequenceMode
    sharding: SequenceSharding
    inner_ring_size: int | None = None

    @classmethod
    def of(
        cls, mode: SequenceMode | None, mesh: ParallelMesh, inner_ring_size: int | None
    ) -> "SequenceParallelConfig | None":
        """Check the options of the user.

        Args:
            mode: The mode; by default all_to_all if the sp axis has several ranks, else split_gather.
            mesh: The mesh.
            inner_ring_size: See `SequenceParallelConfig`.

        Returns:
            How sequences are sharded; None if the axis has one rank.

        Raises:
            ConfigError: There is no such mode, or the ranks are on the other axis.
        """
        mode = mode or ("all_to_all" if mesh.size("sp") > 1 else "split_gather")
        if mode not in get_args(SequenceMode):
            names = ", ".join(map(repr, get_args(SequenceMode)))
            raise ConfigError(f"Sequences are sharded in one of the modes {names}. Found {mode!r}. Pass one of them.")
        axis, other = ("tp", "sp") if mode in MODES_OF_TP else ("sp", "tp")
        if mesh.size(axis) == 1 and mesh.size(other) > 1:
            raise ConfigError(
                f"In the mode {mode!r} sequences are sharded over the {axis} axis. Found {mesh}. Give that axis "
                f"several ranks, or choose a mode of the {other} axis."
            )
        if mode in MODES_OF_TP and mesh.size("sp") > 1:
            raise ConfigError(
                f"In the mode {mode!r} sequences are sharded over the tp axis only. Found {mesh}. "
                "Leave sp out, or choose all_to_all or ring_attn."
            )
        if inner_ring_size is not None and mode != "ring_attn":
            raise ConfigError(
                f"Only ring_attn has inner rings. Found inner_ring_size={inner_ring_size} in the mode {mode!r}. Leave "
                "it out."
            )
        sharding = SequenceSharding(mesh, axis, is_zigzag=mode == "ring_attn")
        return None if sharding.size == 1 else cls(mode, sharding, inner_ring_size)

    @property
    def is_over_tp(self) -> bool:
        """Whether sequences are sharded over the same axis as tensors."""
        return self.mode in MODES_OF_TP
