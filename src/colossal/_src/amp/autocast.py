"""Running a computation in a lower precision."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, final

import torch

from colossal._src._dtypes import HALF_DTYPES
from colossal.errors import ConfigError


@final
@dataclass(frozen=True)
class Autocast:
    """Opens `torch.autocast` contexts of one device type and one dtype."""

    device_type: str  # ``"cpu"`` or ``"cuda"``
    dtype: torch.dtype  # ``torch.float16`` or ``torch.bfloat16``: what matrix products and convolutions run in

    def __post_init__(self) -> None:
        if self.dtype not in HALF_DTYPES:
            raise ConfigError(
                f"Autocast needs torch.float16 or torch.bfloat16. Found {self.dtype}. "
                "Leave mixed precision off to train in float32."
            )

    def context(self) -> torch.autocast:
        """Open autocast."""
        return torch.autocast(self.device_type, self.dtype)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs in a new autocast context at every call.

        A criterion is wrapped so that cross-entropy of half-precision logits is computed in float32, as autocast's
        own table demands; outside of autocast it would be computed in half precision.
        """

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.context():
                return function(*args, **kwargs)

        return wraps(function, updated=())(wrapped)
