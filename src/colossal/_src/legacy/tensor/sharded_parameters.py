"""What older programs ask of the parameters of a sharded model, and of tensors that are padded."""

import re
from collections.abc import Callable
from typing import Any

import torch

from colossal._src.legacy.notice import superseded
from colossal._src.legacy.tensor.d_tensor import copy_layout, has_layout, to_global
from colossal._src.tensor import full_tensor_of, placement_of
from colossal.errors import ShapeError

_LENGTH = "_unpadded_length"
_PATH = re.compile(r"([^.\[\]]+)(?![^\[]*\])|\[(\d+)\]")


def clear_layout_converter() -> None:
    """Forget the paths between layouts that were found: here each conversion plans its own, and none is kept.

    Example:
        >>> from colossal.tensor.d_tensor import clear_layout_converter
        >>> clear_layout_converter()
    """
    superseded("colossal.tensor.d_tensor.clear_layout_converter", "nothing: no path is kept")


def gather_distributed_param(param: torch.Tensor, keep_vars: bool = False) -> torch.Tensor:
    """Put a parameter together from the shards of all ranks.

    Args:
        param: A parameter of a sharded model; a full one is returned as it is.
        keep_vars: Return what belongs to the graph of autograd.

    Returns:
        The full tensor, on all ranks.

    Communication: all_gather, the ranks that hold the shards, the full tensor's bytes.

    Example:
        >>> import torch
        >>> from colossal.checkpoint_io.utils import gather_distributed_param
        >>> gather_distributed_param(torch.nn.Parameter(torch.ones(2)))
        tensor([1., 1.])
    """
    if has_layout(param):
        full = to_global(param)
        return full if keep_vars else full.detach()
    if placement_of(param).is_sharded:
        return full_tensor_of(param)
    return param if keep_vars else param.detach()


def to_padded_tensor(tensor: torch.Tensor, current_length: int, padding_dim: int) -> torch.Tensor:
    """Append zeros along a dimension, and remember how long it was.

    Args:
        tensor: Any tensor; one that is padded is returned as it is.
        current_length: The length with zeros.
        padding_dim: The dimension.

    Returns:
        The tensor with zeros; it has the layout of `tensor` if that has one, and so have its clones.

    Raises:
        ShapeError: The dimension is longer.

    Example:
        >>> import torch
        >>> from colossal.tensor.padded_tensor import is_padded_tensor, to_padded_tensor
        >>> padded = to_padded_tensor(torch.ones(2, 1), 3, 0)
        >>> padded.tolist(), is_padded_tensor(padded)
        ([[1.0], [1.0], [0.0]], True)
    """
    if is_padded_tensor(tensor):
        return tensor
    length = tensor.shape[padding_dim]
    if current_length < length:
        raise ShapeError(
            f"A tensor grows by zeros. Found the length {length} of dimension {padding_dim}, and "
            f"current_length={current_length}. Pass {length} or more."
        )
    zeros = tensor.new_zeros(
        *(current_length - length if at == padding_dim % tensor.ndim else size for at, size in enumerate(tensor.shape))
    )
    return _with_layout_of(tensor, _mark(torch.cat([tensor, zeros], padding_dim), padding_dim, length))


def init_as_padded_tensor(
    tensor: torch.Tensor, current_length: int, origin_length: int, padding_dim: int
) -> torch.Tensor:
    """Remember of a tensor that has zeros at the end how long it was without them, as `to_padded_tensor` does.

    Args:
        tensor: The tensor with zeros.
        current_length: Its length with zeros.
        origin_length: Without.
        padding_dim: The dimension.

    Returns:
        The tensor.

    Raises:
        ShapeError: The tensor has another length, or a shorter one.

    Example:
        >>> import torch
        >>> from colossal.tensor.padded_tensor import init_as_padded_tensor, to_unpadded_tensor
        >>> to_unpadded_tensor(init_as_padded_tensor(torch.tensor([1.0, 0.0]), 2, 1, 0))
        tensor([1.])
    """
    if tensor.shape[padding_dim] != current_length or origin_length > current_length:
        raise ShapeError(
            f"A padded tensor is at least as long as without zeros. Found the length {tensor.shape[padding_dim]} of "
            f"dimension {padding_dim}, current_length={current_length} and origin_length={origin_length}. Pass its "
            "length, and that of before."
        )
    return _mark(tensor, padding_dim, origin_length)


def to_unpadded_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Take the zeros off that `to_padded_tensor` has appended.

    Args:
        tensor: Any tensor; one that is not padded is returned as it is.

    Returns:
        The tensor without them.

    Example:
        >>> import torch
        >>> from colossal.tensor.padded_tensor import to_padded_tensor, to_unpadded_tensor
        >>> to_unpadded_tensor(to_padded_tensor(torch.ones(2), 4, 0))
        tensor([1., 1.])
    """
    if not is_padded_tensor(tensor):
        return tensor
    dim, length = getattr(tensor, _LENGTH)
    return _with_layout_of(tensor, tensor.narrow(dim, 0, length).contiguous())


def is_padded_tensor(tensor: torch.Tensor) -> bool:
    """Return whether `to_padded_tensor` has appended zeros to a tensor.

    Args:
        tensor: Any tensor.

    Returns:
        True if it has.

    Example:
        >>> import torch
        >>> from colossal.tensor.padded_tensor import is_padded_tensor
        >>> is_padded_tensor(torch.ones(2))
        False
    """
    return hasattr(tensor, _LENGTH)


def getattr_(obj: object, attr: str, ignore: bool = False) -> Any:
    """Find an attribute of an attribute.

    Args:
        obj: A module, for example.
        attr: The path, for example ``"encoder.layer[0].attention"``.
        ignore: Return None where there is no such attribute.

    Returns:
        The attribute.

    Raises:
        AttributeError: There is none.

    Example:
        >>> from torch import nn
        >>> from colossal.shardformer._utils import getattr_
        >>> getattr_(nn.ModuleList([nn.Linear(2, 3)]), "[0].out_features")
        3
    """
    found: Any = obj
    for name, index in _PATH.findall(attr):
        if index:
            found = found[int(index)]
        elif hasattr(found, name):
            found = getattr(found, name)
        elif ignore:
            return None
        else:
            raise AttributeError(f"{type(found).__name__} has no attribute {name!r}, a part of {attr!r}", name=name)
    return found


def setattr_(obj: object, attr: str, value: object, ignore: bool = False) -> None:
    """Set an attribute of an attribute.

    Args:
        obj: A module, for example.
        attr: The path, for example ``"encoder.layer[0].attention"``.
        value: What it becomes.
        ignore: Do nothing where there is no such attribute.

    Raises:
        AttributeError: There is none.

    Example:
        >>> from torch import nn
        >>> from colossal.shardformer._utils import setattr_
        >>> layers = nn.ModuleList([nn.Linear(2, 3)])
        >>> setattr_(layers, "[0].out_features", 4)
        >>> layers[0].out_features
        4
    """
    *path, (name, index) = _PATH.findall(attr)
    owner: Any = getattr_(obj, "".join(f".{each}" if each else f"[{at}]" for each, at in path), ignore)
    if getattr_(owner, f"[{index}]" if index else name, ignore) is None and ignore:
        return
    if index:
        owner[int(index)] = value
    else:
        setattr(owner, name, value)


def _mark(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Remember how long a tensor was without zeros; its copies remember it too, and its layout."""
    setattr(tensor, _LENGTH, (dim, length))
    for name in ("clone", "detach"):
        plain: Callable[..., torch.Tensor] = getattr(tensor, name)

        def copy(*args: Any, plain: Callable[..., torch.Tensor] = plain, **kwargs: Any) -> torch.Tensor:
            return _with_layout_of(tensor, _mark(plain(*args, **kwargs), dim, length))

        setattr(tensor, name, copy)
    return tensor


def _with_layout_of(tensor: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """Let what was made of the local values of a tensor have its layout."""
    if has_layout(tensor):
        return copy_layout(tensor, changed)
    return changed
