"""The tensors of a collective: what is required of them, and the addresses of their parts."""

from collections.abc import Sequence
from typing import final

import torch

from colossal.errors import ShapeError, UnsupportedError

_Tensor = torch.Tensor
_Tensors = Sequence[torch.Tensor]


def checked(tensor: _Tensor) -> _Tensor:
    """Return a tensor that can be moved; UnsupportedError for others."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"The backend 'shm' moves dense tensors in host memory. Found a tensor of {tensor.layout} on "
            f"{tensor.device}. Make a group with another backend for it: the one of the device, gloo for sparse ones."
        )
    return tensor


def packed(tensor: _Tensor) -> _Tensor:
    """Return a contiguous tensor: itself, or a copy."""
    return checked(tensor).contiguous()


def check_length(name: str, tensors: _Tensors, size: int) -> None:
    """Check that there is a tensor for each rank."""
    if len(tensors) != size:
        raise ShapeError(f"{name} needs a tensor for each of {size} ranks. Found {len(tensors)}. Pass one for each.")


def check_rank_parts(name: str, parts: _Tensors, full: _Tensor, size: int) -> None:
    """Check that there is a tensor for each rank, of the size and dtype of another one."""
    check_length(name, parts, size)
    for part in parts:
        if part.numel() != full.numel() or part.dtype != full.dtype:
            raise ShapeError(
                f"{name} needs tensors of one size and dtype. Found {tuple(part.shape)} of {part.dtype} and "
                f"{tuple(full.shape)} of {full.dtype}. Pad them, or use all_to_all for parts of several sizes."
            )


def check_full(name: str, full: _Tensor, part: _Tensor, size: int) -> None:
    """Check that one tensor has room for another one of each rank."""
    if full.numel() != part.numel() * size or full.dtype != part.dtype:
        raise ShapeError(
            f"{name} needs a tensor of {size} times the elements of the other, and of its dtype. Found "
            f"{tuple(full.shape)} of {full.dtype} and {tuple(part.shape)} of {part.dtype}. Give the larger one "
            f"{part.numel() * size} elements of {part.dtype}."
        )


def check_peer(peer: int, rank: int, size: int) -> None:
    """Check that a message goes to another rank of the group, or comes from one."""
    if not 0 <= peer < size or peer == rank:
        raise UnsupportedError(
            f"A message goes to another rank of its group, from 0 to {size - 1}. Found {peer} on rank {rank}. Name "
            "another rank; a rank's own data needs no message."
        )


def split_lengths(tensor: _Tensor, lengths: Sequence[int] | None, size: int) -> list[int]:
    """Return how many elements belong to each rank, if the first dimension is divided."""
    rows = tensor.shape[0] if tensor.dim() else 1
    row = tensor.numel() // rows if rows else 0
    if not lengths:
        if rows % size:
            raise ShapeError(
                f"all_to_all without lengths needs a first dimension that divides by {size}. Found "
                f"{tuple(tensor.shape)}. Pass the lengths of the parts."
            )
        return [rows // size * row] * size
    if len(lengths) != size or sum(lengths) != rows or min(lengths) < 0:
        raise ShapeError(
            f"all_to_all needs {size} lengths that add up to the first dimension. Found {list(lengths)} for "
            f"{tuple(tensor.shape)}. Pass one for each rank."
        )
    return [length * row for length in lengths]


def addresses(tensors: _Tensors) -> list[int]:
    """Return the addresses of tensors."""
    return [tensor.data_ptr() for tensor in tensors]


def part_addresses(tensor: _Tensor, lengths: Sequence[int]) -> list[int]:
    """Return the addresses of consecutive parts of a dense tensor, of so many elements each."""
    starts: list[int] = []
    at = tensor.data_ptr()
    for length in lengths:
        starts.append(at)
        at += length * tensor.itemsize
    return starts


@final
class WritableTensor:
    """Lets others write to a tensor: to itself, or to a dense copy that is copied back at the end."""

    def __init__(self, tensor: _Tensor, clear_of: _Tensors = ()) -> None:
        self._tensor = self._dense = checked(tensor)
        if not tensor.is_contiguous() or (clear_of and any(_overlap(tensor, other) for other in clear_of)):
            # `contiguous` returns the tensor itself if it merely overlaps another one.
            self._dense = tensor.contiguous().clone()

    def __enter__(self) -> _Tensor:
        return self._dense

    def __exit__(self, *error: object) -> None:
        # After an error the copy may be half written: the caller's tensor stays as it was.
        if self._dense is not self._tensor and error[0] is None:
            # Autograd refuses in-place writes to parameters, and the thread that runs this has its own grad mode.
            with torch.no_grad():
                self._tensor.detach().copy_(self._dense)


@final
class WritableTensors:
    """The same for several tensors."""

    def __init__(self, tensors: _Tensors) -> None:
        self._all = [WritableTensor(tensor) for tensor in tensors]

    def __enter__(self) -> list[_Tensor]:
        return [one.__enter__() for one in self._all]

    def __exit__(self, *error: object) -> None:
        for one in self._all:
            one.__exit__(*error)


def _overlap(one: _Tensor, other: _Tensor) -> bool:
    # Both are contiguous here, so that their numbers of elements are their extents.
    begin, end = one.data_ptr(), one.data_ptr() + one.numel() * one.itemsize
    return begin < other.data_ptr() + other.numel() * other.itemsize and other.data_ptr() < end
