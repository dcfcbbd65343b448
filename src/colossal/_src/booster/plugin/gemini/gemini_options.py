"""The options of `GeminiPlugin`, one object for each concern."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self, final

from colossal._src.amp import ScalerConfig
from colossal._src.booster.plugin.zero_options import ZeroOptions
from colossal._src.cluster import ParallelMesh
from colossal._src.interface import Clipping, Keywords
from colossal._src.zero import ZeroConfig
from colossal.errors import ConfigError

if TYPE_CHECKING:
    from colossal._src.shardformer import ShardConfig
    from colossal._src.zero.gemini import GeminiConfig


@final
@dataclass(frozen=True, kw_only=True)
class GeminiOptions:
    """What the user said."""

    loss_scale: ScalerConfig  # how the loss scale changes
    zero: ZeroOptions  # the precision, and how gradients are reduced and are clipped
    chunks: "GeminiConfig"  # how parameters are put into chunks, and where these are kept
    sharding: "ShardConfig"  # what `ShardFormer` does before, without a mesh yet
    tp_size: int = 1  # ranks over which each tensor is sharded

    def __post_init__(self) -> None:
        if self.tp_size < 1:
            raise ConfigError(f"At least one rank has a tensor. Found tp_size={self.tp_size}. Pass 1 or more.")

    @classmethod
    def read(cls, keywords: Keywords) -> Self:
        """Sort the keywords of the plugin by concern."""
        from colossal._src.shardformer import ShardConfig
        from colossal._src.zero.gemini import GeminiConfig

        return keywords.read(
            cls,
            loss_scale=keywords.read(ScalerConfig),
            zero=keywords.read(
                ZeroOptions,
                plugin="GeminiPlugin",
                clipping=keywords.read(Clipping),
                zero=keywords.read(ZeroConfig, stage=2),
            ),
            chunks=keywords.read(GeminiConfig),
            sharding=keywords.read(ShardConfig, parallel_output=False),
        )

    @property
    def shards_model(self) -> bool:
        """Whether `ShardFormer` has something to do: to shard over tp, or to apply an option."""
        options = (each.name for each in fields(self.sharding) if each.name.startswith("enable_"))
        asked = any(getattr(self.sharding, name) for name in options if name != "enable_tensor_parallelism")
        return asked or self.tp_size > 1

    def shard_config(self, mesh: ParallelMesh) -> "ShardConfig":
        """Say what `ShardFormer` does on a mesh."""
        return replace(self.sharding, mesh=mesh)
