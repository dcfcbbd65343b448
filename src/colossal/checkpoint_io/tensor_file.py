"""One file of tensors, in PyTorch's own format or in safetensors; its content says which, not its name."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from colossal.errors import CheckpointError, UnsupportedError

_HEAD_BYTES = 9  # enough to tell the formats apart


def compact(content: dict[Any, Any]) -> dict[Any, Any]:
    """Return the content with a copy of each tensor that is part of larger memory, which would be saved with it.

    Args:
        content: Tensors and other values by name. One tensor under two names stays one tensor.

    Returns:
        The content itself if no copy is needed, else a dict of the same type and attributes.
    """
    views = {id(value): value.clone() for value in content.values() if _is_part(value)}
    if not views:
        return content
    compacted = copy.copy(content)
    compacted.update((name, views[id(value)]) for name, value in content.items() if id(value) in views)
    return compacted


def write_torch(path: Path, content: dict[Any, Any]) -> None:
    """Write `content` in PyTorch's format and make sure that it can be read without executing pickle.

    Args:
        path: The file.
        content: Tensors and plain data, nested in dicts and lists.

    Raises:
        CheckpointError: The content holds something else, such as a function.
    """
    try:
        torch.save(compact(content), path)
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            "A checkpoint can hold tensors and plain data: numbers, strings, lists and dicts of them. Found state that "
            f"could not be written and read back: {_first_line(error)}. Keep functions and objects out of the state."
        ) from error


def write_safetensors(path: Path, content: dict[str, Any]) -> None:
    """Write named tensors in the safetensors format.

    Args:
        path: The file.
        content: Tensors by name, no two of them in the same memory.

    Raises:
        CheckpointError: A value is not a tensor.
        UnsupportedError: The package safetensors is not installed.
    """
    save_file = require_safetensors().torch.save_file
    foreign = {name: type(value).__name__ for name, value in content.items() if not isinstance(value, torch.Tensor)}
    if foreign:
        raise CheckpointError(
            f"A safetensors file can hold tensors only. Found state of other types: {foreign}. "
            "Pass use_safetensors=False for this model."
        )
    save_file({name: tensor.contiguous() for name, tensor in compact(content).items()}, path, metadata={"format": "pt"})


def read_tensor_file(path: Path, *, mmap: bool) -> dict[Any, Any]:
    """Read a file of either format, to the CPU, without executing pickle.

    Args:
        path: The file.
        mmap: Map the file rather than read it: memory is taken when a tensor is used, and belongs to the file.

    Returns:
        What was saved; for safetensors a dict of named tensors.

    Raises:
        CheckpointError: The file is missing, damaged, of another format, or holds no dict.
        UnsupportedError: The package safetensors is needed and not installed.
    """
    try:
        content = _reader(path)(path, mmap)
    except (CheckpointError, UnsupportedError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"Loading needs a readable file of tensors. Found {path}, which cannot be read: {_first_line(error)}. "
            "Check that it was copied whole, and that it was saved by PyTorch or safetensors."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"A file of a checkpoint must hold a dict. Found a {type(content).__name__} in {path}. "
            "Check that the path is that of a checkpoint."
        )
    return content


def require_safetensors() -> Any:
    """Return the package safetensors.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise UnsupportedError(
            "Files in the safetensors format need the package safetensors. Found that it is not installed. "
            "Run: pip install 'colossal[hf]'"
        ) from error
    return safetensors


def _is_part(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes


def _reader(path: Path) -> Callable[[Path, bool], Any]:
    """Tell the format from the first bytes of the file."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"PK\x03\x04"):
        return _read_torch
    if head.startswith(b"\x80"):
        return _read_old_torch
    if head[8:] == b"{":
        return _read_safetensors
    raise CheckpointError(
        f"Loading needs a file that PyTorch or safetensors wrote. Found {path}, which starts with {head!r}. "
        "Check the path, and that the file was copied whole."
    )


def _read_torch(path: Path, mmap: bool) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _read_old_torch(path: Path, _mmap: bool) -> Any:
    """Read the format before PyTorch 1.6, which cannot be mapped."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_safetensors(path: Path, mmap: bool) -> dict[str, torch.Tensor]:
    safetensors = require_safetensors()
    if not mmap:
        return safetensors.torch.load(path.read_bytes())
    with safetensors.safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
