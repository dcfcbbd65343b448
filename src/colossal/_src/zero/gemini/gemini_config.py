"""The options of chunks and of their placement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from colossal._src.zero.gemini.placement_policy import AutoPlacement, PlacementPolicy, StaticPlacement
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError

_FRACTIONS_OF: Mapping[str, tuple[float, float]] = {"cuda": (0.0, 0.0), "cpu": (1.0, 1.0), "const": (1.0, 1.0)}
_POLICIES = ("static", "auto", *_FRACTIONS_OF)


@final
@dataclass(frozen=True)
class GeminiConfig:
    """How parameters are put into chunks, and where these are kept."""

    # for numbers of ranks, ``{"chunk_size": elements, "keep_gathered": bool}``; by default the size is searched for
    chunk_config_dict: Mapping[int, Mapping[str, Any]] | None = None
    # ``"static"``: as the fractions below say; ``"cuda"``: all on the device; ``"cpu"``, ``"const"``: all in host
    # memory, parameters between their uses; ``"auto"``: on the device while it fits
    placement_policy: str = "static"
    max_prefetch: int = 0  # how many chunks are gathered ahead of their use
    shard_param_frac: float = 1.0  # static: the fraction of the parameters that is sharded
    offload_optim_frac: float = 0.0  # static: the fraction of the optimizer that is in host memory
    offload_param_frac: float = 0.0  # static: the fraction of the parameters that is in host memory between its uses
    warmup_non_model_data_ratio: float = 0.8  # auto: the fraction of the device memory that the first pass keeps free
    steady_cuda_cap_ratio: float = 0.9  # auto: the fraction of a GPU's memory that is the budget, if there is none
    # page-lock the host memory of chunks, from which a GPU copies faster; on a CPU there is nothing to page-lock
    pin_memory: bool = False
    strict_ddp_mode: bool = False  # keep full parameters on all ranks, on the device under each policy but ``"auto"``
    search_range_m: float = 32  # how far above the smallest chunk the size is searched for; in units of 2**20 elements
    hidden_dim: int | None = None  # the step of that search, in elements; 1024 by default
    # the smallest chunk, in units of 2**20 elements; none is smaller than the largest parameter
    min_chunk_size_m: float = 32
    # the most bytes on the device, for parameters, gradients, optimizer states, and with the auto policy for what
    # autograd saves
    device_budget: int | None = None
    verbose: bool = False  # log the chunk configuration
    nvme_param_frac: float = 0.0  # static: the fraction of the parameters that is in files between its uses
    nvme_offload_dir: str | None = None  # the folder of these, on a fast disk; that of temporary files by default

    def __post_init__(self) -> None:
        if self.placement_policy not in _POLICIES:
            raise ConfigError(
                f"placement_policy is one of {', '.join(map(repr, _POLICIES))}. Found {self.placement_policy!r}. Pass "
                "'static' to set the fractions, 'cuda' for everything on the device, 'cpu' for host memory."
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
                "steady_cuda_cap_ratio is a fraction of the GPU's memory. Found "
                f"{self.steady_cuda_cap_ratio}. Pass a number above 0, up to 1; the default is 0.9."
            )
        self._check_fractions()
        _ = self.placement

    def _check_fractions(self) -> None:
        """Reject fractions that contradict the policy; those that equal its own are accepted."""
        given = (self.shard_param_frac, self.offload_optim_frac, self.offload_param_frac, self.nvme_param_frac)
        optim, param = _FRACTIONS_OF.get(self.placement_policy, (0.0, 0.0))
        fit = given[0] == 1.0 and given[1] in (0.0, optim) and given[2] in (0.0, param) and given[3] == 0.0
        if self.placement_policy != "static" and not fit:
            raise ConfigError(
                f"The policy {self.placement_policy!r} sets the fractions itself. Found shard_param_frac, "
                f"offload_optim_frac, offload_param_frac and nvme_param_frac of {given}. Leave them out, or pass "
                "placement_policy='static'."
            )

    @property
    def placement(self) -> PlacementPolicy:
        """The policy."""
        if self.placement_policy == "auto":
            return AutoPlacement(self.warmup_non_model_data_ratio)
        own = (self.offload_optim_frac, self.offload_param_frac)
        optim, param = _FRACTIONS_OF.get(self.placement_policy, own)
        if self.strict_ddp_mode and self.placement_policy in _FRACTIONS_OF:
            param = 0.0  # full parameters on all ranks are on the device
        sharded = 0.0 if self.strict_ddp_mode else self.shard_param_frac
        return StaticPlacement(sharded, optim, param, self.max_prefetch, self.nvme_param_frac)

    def budget_on(self, device: torch.device) -> int | None:
        """Find the most bytes that may be used on a device."""
        available = None if self.placement_policy == "static" else get_accelerator(device.type).available_memory()
        if self.device_budget is not None or available is None:
            return self.device_budget
        return int(available * self.steady_cuda_cap_ratio)
