"""Parameters whose values a program may write by ``parameter.data``, which torch's counter of changes does not see."""

import weakref
from collections.abc import Set as AbstractSet
from typing import final

import torch
from torch import nn


@final
class DataAliases:
    """The tensors that ``parameter.data`` gave to a program: each may be written for as long as it is alive."""

    def __init__(self) -> None:
        self._aliases: dict[nn.Parameter, list[weakref.ref[torch.Tensor]]] = {}

    def add(self, parameter: nn.Parameter, alias: torch.Tensor) -> None:
        """Expect writes through a tensor that shares the memory of a parameter."""
        self._aliases.setdefault(parameter, []).append(weakref.ref(alias))

    def take(self) -> AbstractSet[nn.Parameter]:
        """Return the parameters that may have been written since the last call."""
        if not self._aliases:
            return frozenset()
        found = self._aliases.keys()
        alive = {each: [ref for ref in refs if ref() is not None] for each, refs in self._aliases.items()}
        self._aliases = {each: refs for each, refs in alive.items() if refs}
        return found
