"""What the user may say about chunks and where they are kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from colossal.errors import ConfigError, UnsupportedError
from colossal.zero.gemini.placement import AutoPlacement, PlacementPolicy, StaticPlacement

_POLICIES = ("static", "auto")


@final
@dataclass(frozen=True)
class GeminiConfig:
    """How parameters are put into chunks, and where these are kept.

    Args:
        chunk_config_dict: For numbers of ranks, ``{"chunk_size": elements, "keep_gathered": bool}``; by default the
            size is searched for.
        placement_policy: ``"static"`` or ``"auto"``.
        max_prefetch: How many chunks are gathered ahead of their use.
        shard_param_frac: Static: the share of the parameters that ranks divide among themselves.
        offload_optim_frac: Static: the share of the optimizer that is in host memory.
        offload_param_frac: Static: the share of the parameters that is in host memory between its uses.
        warmup_non_model_data_ratio: Auto: the share of the device that the first pass keeps free.
        steady_cuda_cap_ratio: Auto: the share of a GPU's memory that is the budget, if there is none.
        pin_memory: Page-lock the host memory of chunks, from which a GPU copies faster.
        strict_ddp_mode: Keep all parameters whole on all ranks.
        search_range_m: How far above the smallest chunk the size is searched for; in units of 2**20 elements.
        hidden_dim: The step of that search, in elements; 1024 by default.
        min_chunk_size_m: The smallest chunk, in units of 2**20 elements.
        device_budget: The most bytes on the device, for parameters, gradients, optimizer states, and with the auto
            policy for what autograd saves.
        verbose: Log the chunk configuration.
        nvme_param_frac: Static: the share of the parameters that is in files between its uses.
        nvme_offload_dir: The folder of these, on a fast disk; that of temporary files by default.

    Raises:
        ConfigError: A value is outside its range, or two contradict each other.

    Example:
        >>> from colossal.zero.gemini import GeminiConfig
        >>> type(GeminiConfig(placement_policy="auto").placement).__name__
        'AutoPlacement'
    """

    chunk_config_dict: Mapping[int, Mapping[str, Any]] | None = None
    placement_policy: str = "static"
    max_prefetch: int = 0
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    pin_memory: bool = False
    strict_ddp_mode: bool = False
    search_range_m: float = 32
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    device_budget: int | None = None
    verbose: bool = False
    nvme_param_frac: float = 0.0
    nvme_offload_dir: str | None = None

    def __post_init__(self) -> None:
        if self.placement_policy not in _POLICIES:
            raise ConfigError(
                f"placement_policy is one of {', '.join(map(repr, _POLICIES))}. Found {self.placement_policy!r}. For "
                "everything on the device pass 'static'; for everything in host memory, 'static' with "
                "offload_optim_frac=1.0 and offload_param_frac=1.0."
            )
        if self.max_prefetch < 0:
            raise ConfigError(
                f"max_prefetch is a number of chunks. Found {self.max_prefetch}. Pass 0 to gather none ahead."
            )
        if self.device_budget is not None and self.device_budget < 1:
            raise ConfigError(
                f"device_budget is a number of bytes. Found {self.device_budget}. Leave it out for no limit."
            )
        if not 0 < self.steady_cuda_cap_ratio <= 1:
            raise ConfigError(
                "steady_cuda_cap_ratio is a share of the GPU's memory. Found "
                f"{self.steady_cuda_cap_ratio}. Pass a number above 0, up to 1; the default is 0.9."
            )
        shares = (self.shard_param_frac, self.offload_optim_frac, self.offload_param_frac, self.nvme_param_frac)
        if self.placement_policy == "auto" and shares != (1.0, 0.0, 0.0, 0.0):
            raise ConfigError(
                "The auto policy finds shares by itself. Found shard_param_frac, offload_optim_frac, "
                f"offload_param_frac and nvme_param_frac of {shares}. Leave them out, or pass "
                "placement_policy='static'."
            )
        _ = self.placement

    @property
    def placement(self) -> PlacementPolicy:
        """The policy."""
        if self.placement_policy == "auto":
            return AutoPlacement(self.warmup_non_model_data_ratio)
        share = 0.0 if self.strict_ddp_mode else self.shard_param_frac
        shares = (self.offload_optim_frac, self.offload_param_frac)
        return StaticPlacement(share, *shares, self.max_prefetch, self.nvme_param_frac)

    def budget_on(self, device: torch.device) -> int | None:
        """Find the most bytes that may be used on a device.

        Args:
            device: The device.

        Returns:
            Bytes; None for no limit.

        Raises:
            UnsupportedError: Memory can not be page-locked for this device.
        """
        if self.pin_memory and device.type == "cpu":
            raise UnsupportedError(
                "Host memory is page-locked for copies to a GPU. Found pin_memory=True on the CPU. Leave it out."
            )
        if self.device_budget is not None or self.placement_policy == "static" or device.type == "cpu":
            return self.device_budget
        return int(torch.cuda.get_device_properties(device).total_memory * self.steady_cuda_cap_ratio)
