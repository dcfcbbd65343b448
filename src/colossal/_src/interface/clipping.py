"""How gradients are clipped before a step."""

from dataclasses import dataclass
from typing import final

from colossal.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True)
class Clipping:
    """The norm to which a step clips the gradients of all parameters together."""

    max_norm: float = 0.0  # the largest norm; 0 does not clip
    norm_type: float = 2.0  # the p of the norm; greater than 0

    def __post_init__(self) -> None:
        if self.max_norm < 0 or not self.norm_type > 0:
            raise ConfigError(
                "Gradients are clipped to a norm of at least 0 (which does not clip), of a p greater than 0. Found "
                f"max_norm={self.max_norm} and norm_type={self.norm_type}. The defaults are 0.0 and 2.0."
            )
