"""A module whose parameters are where boost has put them."""

from collections.abc import Callable
from itertools import chain
from typing import Any, Self

import torch
from torch import nn

from colossal.errors import UnsupportedError


class PlacedModule(nn.Module):
    """Takes moves to where its parameters are, such as ``model.to(device)``, and refuses those that torch cannot do."""

    def _apply(self, fn: Callable[[torch.Tensor], Any], recurse: bool = True) -> Self:
        try:
            if all(fn(tensor) is tensor for tensor in chain(super().parameters(recurse), super().buffers(recurse))):
                return self  # torch would replace shards by themselves, which fails where something refers to them
            return super()._apply(fn, recurse)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error) and not isinstance(error, UnsupportedError):
                raise
            raise UnsupportedError(
                "boost places the parameters of a model, and casts them as the precision says. Found a move or a cast "
                "of sharded ones afterwards, as by to() or half(). Do it before boost, or pass device and "
                "mixed_precision to the Booster."
            ) from error
