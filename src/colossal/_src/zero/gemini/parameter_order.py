"""In which order a model uses its parameters."""

from collections.abc import Sequence
from typing import Protocol

from torch import nn


class ParameterOrder(Protocol):
    """What knows in which order a model uses its parameters.

    Example:
        >>> from colossal._src.zero.gemini import ParameterOrder
        >>> class Backwards(ParameterOrder):
        ...     param_order = ("last", "first")
        >>> Backwards().param_order[0]
        'last'
    """

    @property
    def param_order(self) -> Sequence[nn.Parameter]:
        """The parameters, the one that is used first in front."""
        ...
