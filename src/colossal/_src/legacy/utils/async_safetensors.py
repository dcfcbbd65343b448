"""Files of safetensors that are written in the background, by the older names."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import final

import torch

from colossal._src.legacy.notice import superseded
from colossal.errors import ShapeError


@final
class AsyncFileWriter:
    """A file that is being written.

    Args:
        path: The file.
        tensors: What it holds, on the host.
        metadata: Text that it holds in addition.
    """

    def __init__(self, path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> None:
        from safetensors.torch import save_file

        pool = ThreadPoolExecutor(1, thread_name_prefix="colossal-safetensors")
        self._written = pool.submit(save_file, dict(tensors), Path(path), None if metadata is None else dict(metadata))
        pool.shutdown(wait=False)

    def synchronize(self) -> None:
        """Wait until the file is complete.

        Raises:
            OSError: It could not be written.
        """
        self._written.result()


def save(
    path: str, state_dict: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> AsyncFileWriter:
    """Begin to write tensors of the host to a file.

    Args:
        path: The file.
        state_dict: The tensors, which must not change until the file is complete.
        metadata: Text that the file holds in addition.

    Returns:
        What is waited for, by `AsyncFileWriter.synchronize`.
    """
    return move_and_save(path, state_dict, None, metadata)


def move_and_save(
    path: str,
    state_dict: Mapping[str, torch.Tensor],
    state_dict_pinned: Mapping[str, torch.Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> AsyncFileWriter:
    """Copy tensors to the host, and begin to write them to a file.

    Args:
        path: The file.
        state_dict: The tensors, on any device. Those of the host must not change until the file is complete, if they
            are not copied.
        state_dict_pinned: Tensors on the host that they are copied to, by their names.
        metadata: Text that the file holds in addition.

    Returns:
        What is waited for, by `AsyncFileWriter.synchronize`.

    Raises:
        ShapeError: A tensor on the host is missing, or differs in shape or dtype.
    """
    superseded("colossal.utils.safetensors", "Booster.save_model(..., use_async=True)")
    tensors = {name: tensor.detach() for name, tensor in state_dict.items()}
    if state_dict_pinned is None:
        on_host = {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}
    else:
        on_host = {name: _copied(name, tensor, state_dict_pinned.get(name)) for name, tensor in tensors.items()}
    return AsyncFileWriter(path, on_host, metadata)


def _copied(name: str, tensor: torch.Tensor, pinned: torch.Tensor | None) -> torch.Tensor:
    if pinned is None or (pinned.shape, pinned.dtype) != (tensor.shape, tensor.dtype):
        found = "none" if pinned is None else f"{tuple(pinned.shape)} of {pinned.dtype}"
        raise ShapeError(
            f"What {name!r} is copied to has its shape {tuple(tensor.shape)} and {tensor.dtype}. Found {found}. Pass "
            "such a tensor on the host."
        )
    return pinned.copy_(tensor)
