"""The options of `GeminiPlugin`, checked and sorted."""

from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch

from colossal.amp import ScalerConfig
from colossal.booster.plugin.zero_options import ZeroOptions
from colossal.cluster import ParallelMesh
from colossal.comm import Partition
from colossal.errors import UnsupportedError
from colossal.zero import ZeroConfig

_KEYWORDS = {"init_scale": "initial_scale"}
_INSTEAD = {
    "tp_size": (1, "tp_size=1 with more data-parallel ranks; the layers of colossal.nn are tensor-parallel"),
    "gpu_margin_mem_ratio": (0.0, "placement_policy='static' with an offload_optim_frac below 1"),
    "enable_all_optimization": (False, "the model as it is; torch's fused attention is used by most models already"),
    "enable_fused_normalization": (False, "the model as it is"),
    "enable_flash_attention": (False, "attn_implementation='sdpa', torch's fused attention, when building the model"),
    "enable_sequence_parallelism": (False, "activation checkpointing for long sequences"),
    "enable_jit_fused": (False, "the model as it is"),
    "use_fp8": (False, "precision='bf16', or TorchDDPPlugin with mixed_precision='fp8'"),
    "fp8_communication": (False, "precision='bf16'"),
}


def sort_options(said: dict[str, Any]) -> tuple[ScalerConfig, "GeminiOptions"]:
    """Sort what the user said.

    Args:
        said: The arguments of `GeminiPlugin` by name.

    Returns:
        How the loss scale moves, and all else.

    Raises:
        ConfigError: A value is outside its range.
        UnsupportedError: One is not what is built, or two do not work together.
    """
    _refuse_unbuilt(said)
    own = {field.name for field in fields(GeminiOptions)}
    gradients = ZeroConfig(2, overlap_communication=said["enable_async_reduce"], master_weights=said["master_weights"])
    options = GeminiOptions(**{n: v for n, v in said.items() if n in own}, gradients=gradients, said=said)
    scale = {field.name: said[_KEYWORDS.get(field.name, field.name)] for field in fields(ScalerConfig)}
    return ScalerConfig(**scale), options


def _refuse_unbuilt(said: dict[str, Any]) -> None:
    """Refuse options that nothing would honour."""
    for name, (built, instead) in _INSTEAD.items():
        value = said[name]
        if value != built:
            raise UnsupportedError(
                f"GeminiPlugin shares whole layers among data-parallel ranks. Found {name}={value}, which is not "
                f"built yet. The nearest that works is {instead}."
            )


@final
@dataclass(frozen=True)
class GeminiOptions:
    """What the user said, besides how the loss scale moves.

    Args:
        precision: What the model is cast to: one of fp16, bf16, and fp32 for the dtype that it has.
        max_norm: Clip the common norm of the gradients to it; 0 does not.
        norm_type: The p of that norm.
        extra_dp_size: Number of blocks of ranks that hold the same shards.
        verbose: Log the chunk configuration and each change of the loss scale.
        force_outputs_fp32: Cast outputs even if nothing else is cast.
        scatter_after_inference: Release all chunks after a forward pass without gradients.
        chunk_init_device: Where chunks are built.
        memstats: Knows the order in which parameters are used.
        gradients: How gradients travel.
        said: All arguments of the plugin by name.

    Raises:
        ConfigError: A value is outside its range.
        UnsupportedError: Two values do not work together.
    """

    precision: str
    max_norm: float
    norm_type: float
    extra_dp_size: int
    verbose: bool
    force_outputs_fp32: bool
    scatter_after_inference: bool
    chunk_init_device: torch.device | str | None
    memstats: Any
    gradients: ZeroConfig
    said: dict[str, Any]

    def __post_init__(self) -> None:
        _ = self._zero, self.chunks

    @property
    def _zero(self) -> ZeroOptions:
        """Those options that LowLevelZeroPlugin has as well, which checks them."""
        zero = replace(self.gradients, overlap_allgather=False)
        return ZeroOptions(
            self.precision, self.max_norm, self.norm_type, self.extra_dp_size, True, self.verbose, zero, "GeminiPlugin"
        )

    @property
    def chunks(self) -> Any:
        """How parameters are put into chunks, and where these are kept."""
        from colossal.zero.gemini import GeminiConfig

        return GeminiConfig(**{field.name: self.said[field.name] for field in fields(GeminiConfig)})

    @property
    def dtype(self) -> torch.dtype | None:
        """What the model is cast to; None leaves it as it is."""
        return self._zero.dtype

    def partition(self, mesh: ParallelMesh) -> Partition:
        """Find the ranks that share chunks, and those that hold the same share.

        Args:
            mesh: The mesh in force.

        Raises:
            MeshError: The replicas do not divide the dp axis.
        """
        return self._zero.partition(mesh)
