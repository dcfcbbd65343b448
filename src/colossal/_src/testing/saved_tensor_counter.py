"""Count what autograd saves for the backward pass."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from colossal._src.tensor import local_of
from colossal.errors import UnsupportedError


@final
class SavedTensorCounter:
    """Counts the bytes that autograd saves for the backward pass while it is open.

    Tensors that share memory are counted once. What activation checkpointing computes again is not saved.

    Args:
        model: Its parameters are left out, as they are in memory anyway; also any tensors.

    Raises:
        UnsupportedError: The parameters are in chunks of Gemini.

    Attributes:
        bytes: Number of bytes that this rank has saved; known when it is closed.

    Example:
        >>> import torch
        >>> from colossal.testing import SavedTensorCounter
        >>> model = torch.nn.Linear(4, 2)
        >>> with SavedTensorCounter(model) as saved:
        ...     y = model(torch.ones(8, 4))
        >>> saved.bytes
        128
    """

    def __init__(self, model: nn.Module | Iterable[torch.Tensor] = ()) -> None:
        self.bytes = 0
        self._left_out = list(model.parameters() if isinstance(model, nn.Module) else model)
        # The storages themselves, not only their addresses: one that is freed meanwhile gives its address away.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._hooks: Any = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Self:
        self._places()
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        left_out = self._places()
        self.bytes += sum(each.nbytes() for place, each in self._storages.items() if place not in left_out)
        self._storages.clear()

    def _places(self) -> set[int]:
        """Where the tensors are that are left out."""
        try:
            return {_place(local_of(tensor).untyped_storage()) for tensor in self._left_out}
        except UnsupportedError as error:
            raise UnsupportedError(
                "What autograd saves is counted where parameters keep their memory. Found some in chunks of Gemini, "
                "which also packs what its passes save. Count under LowLevelZeroPlugin: activations are the same."
            ) from error

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = local_of(tensor).untyped_storage()
        self._storages[_place(storage)] = storage
        return tensor


def _place(storage: torch.UntypedStorage) -> int:
    """What identifies a storage while it is held; on the meta device none has an address of data."""
    return storage.data_ptr() or id(storage)
