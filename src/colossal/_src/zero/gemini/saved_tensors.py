"""What autograd saves for the backward pass: for views of chunks their offsets, for other tensors the bytes."""

from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from colossal._src.zero.gemini.chunk import Chunk
from colossal.errors import UnsupportedError

Fetch = Callable[[Chunk, int], None]
"""Gathers a chunk for the backward pass, which reads one of its parameters."""


@final
@dataclass(frozen=True)
class SavedView:
    """A view of a chunk that the backward pass is going to read."""

    chunk: Chunk
    index: int  # the parameter in which the view begins
    offset: int  # where it begins in the chunk
    size: torch.Size  # its shape
    stride: tuple[int, ...]  # its strides
    version: int  # how often the values of the chunk had changed


@final
class SavedTensors:
    """Hooks for the tensors that autograd saves: replaces views of chunks, and counts the bytes of other tensors.

    [Note: saved views] Autograd saves weights as views of a gathered chunk. Only the offset, shape and strides of such
    a view are kept here, so that the chunk can be released; when the backward pass reads it, the chunk is gathered
    again, and the backward pass gets the same view of the new buffer. So only the backward pass itself decides what it
    needs and when: no structure of the model is assumed, and what it does not read, such as biases and embeddings, is
    not gathered. The same holds for operations that a backward pass recomputes. Where hooks of other code are active,
    such as those of non-reentrant activation checkpointing, these get a view of a parameter instead of the parameter.
    """

    def __init__(self, count: Callable[[int], None] | None) -> None:
        self.chunks_by_storage: dict[int, Chunk] = {}
        self._count = count
        self._held: dict[int, int] = {}

    def hooks(self, fetch: Fetch) -> saved_tensors_hooks:
        """Open the context in which the forward pass runs, in whose graph `fetch` stays."""
        return saved_tensors_hooks(self._pack, partial(_unpack, fetch))

    def op_hooks(self, fetch: Fetch) -> AbstractContextManager[Any]:
        """Open the context in which one operation runs that reads parameters."""
        backend: Any = torch._C  # noqa: SLF001 (no public function returns it)
        top = backend._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001 (nor this)
        # a backward pass that recomputes an operation, outside of `forward_pass`
        if top is None:
            return self.hooks(fetch)
        pack, unpack = top
        # those of `forward_pass` are active
        if pack == self._pack:
            return nullcontext()
        return saved_tensors_hooks(lambda tensor: pack(_plain(tensor)), unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        chunk = self.chunks_by_storage.get(storage._cdata)  # noqa: SLF001 (the identity of a memory has no public name)
        # the address of a storage that was freed may be that of another tensor by now
        if chunk is not None and chunk.uses_storage(storage):
            offset = int(tensor.storage_offset())
            index = max(bisect_right(chunk.starts, offset) - 1, 0)
            return SavedView(chunk, index, offset, tensor.size(), tensor.stride(), chunk.num_updates)
        if self._count is None:
            return tensor
        return _Counted(tensor, storage._cdata, storage.nbytes(), self)  # noqa: SLF001

    def grow(self, key: int, num_bytes: int) -> None:
        """Count one more tensor that shares a memory."""
        if key not in self._held and self._count is not None:
            self._count(num_bytes)
        self._held[key] = self._held.get(key, 0) + 1

    def shrink(self, key: int, num_bytes: int) -> None:
        """Count one tensor less."""
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
            if self._count is not None:
                self._count(-num_bytes)


def _unpack(fetch: Fetch, saved: Any) -> torch.Tensor:
    if isinstance(saved, SavedView):
        if saved.version != saved.chunk.num_updates:
            raise UnsupportedError(
                "A backward pass needs the parameters with which its forward pass was computed. Found that they were "
                "updated in between. Run the backward pass before the step."
            )
        fetch(saved.chunk, saved.index)
        assert saved.chunk.full is not None
        return saved.chunk.full.as_strided(saved.size, saved.stride, saved.offset)
    return saved.tensor if isinstance(saved, _Counted) else saved


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor


@final
class _Counted:
    """A saved tensor that is counted as long as it is saved."""

    def __init__(self, tensor: torch.Tensor, key: int, num_bytes: int, saved: SavedTensors) -> None:
        self.tensor, self._key, self._num_bytes, self._saved = tensor, key, num_bytes, saved
        # stays so if the budget refuses these bytes: `__del__` must not subtract what was never added
        self._is_counted = False
        saved.grow(key, num_bytes)
        self._is_counted = True

    def __del__(self) -> None:
        if self._is_counted:
            self._saved.shrink(self._key, self._num_bytes)
