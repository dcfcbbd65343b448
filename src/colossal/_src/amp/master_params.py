"""Master parameters, which an optimizer updates in place of those of the model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class MasterParams(ABC):
    """What an optimizer holds in place of the parameters of the model: float32 copies, or this rank's shards.

    In each step `copy_grads_to_masters` gives them the gradients of the working parameters, the optimizer updates them,
    and `copy_params_from_masters` copies the new values back.

    Attributes:
        pairs: The working parameter of each master weight.

    Example:
        >>> import torch
        >>> from colossal._src.amp import MasterParams, MasterWeights
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> masters = MasterWeights(torch.optim.SGD([weight]), [weight])
        >>> isinstance(masters, MasterParams), len(masters.pairs)
        (True, 1)
    """

    pairs: dict[nn.Parameter, nn.Parameter]

    def backward_pass(self) -> AbstractContextManager[Any]:
        """Open the context in which gradients of the working parameters are computed.

        Returns:
            A new context manager; by default one that does nothing.
        """
        return nullcontext()

    @abstractmethod
    def add_group(self, group: dict[str, Any]) -> Mapping[nn.Parameter, nn.Parameter]:
        """Create master weights for a group that was added to the optimizer.

        Args:
            group: One of the optimizer's groups; changed in place.

        Returns:
            The new master weights, and the working parameter of each.
        """

    @abstractmethod
    def copy_grads_to_masters(self) -> None:
        """Move the gradients of the working parameters to the master weights, adding to what is there."""

    @abstractmethod
    def copy_params_from_masters(self) -> None:
        """Copy the values of the master weights into the working parameters."""

    @abstractmethod
    def refresh(self) -> None:
        """Copy the values of the working parameters into the master weights."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the working parameters.

        Args:
            set_to_none: Free them rather than fill them with zeros.
        """
