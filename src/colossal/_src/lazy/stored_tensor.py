# pyright: reportUnknownVariableType=false
"""Tensors in safetensors files: read when their values are needed, and only as much of them as is needed."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from colossal._src.lazy.recipe import Operation, Recipe, View
from colossal._src.lazy.tensor import LazyTensor, make_lazy_tensor
from colossal._src.tensor import Region
from colossal.errors import CheckpointError

_CPU = torch.device("cpu")


@final
@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as an operation that makes its values."""

    path: Path  # the file
    name: str  # the name of the tensor in it
    # size and time of the file when its header was read: it must not change until the values are
    stamp: tuple[int, int]

    def __call__(self) -> torch.Tensor:
        """Read all of it."""
        with self._opened() as file:
            return file.get_tensor(self.name).clone()

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Read some of its elements."""
        with self._opened() as file:
            return file.get_tensor(self.name).view(-1)[begin:end].clone()  # the file is mapped: no more is read

    def read_region(self, region: Region) -> torch.Tensor:
        """Read a region of it."""
        with self._opened() as file:
            return file.get_tensor(self.name)[region.slices].clone(memory_format=torch.contiguous_format)

    @contextmanager
    def _opened(self) -> Generator[Any]:
        what = f"the tensor {self.name!r} of {self.path}"
        with _opened(self.path, what) as file:
            if _stamp(self.path) != self.stamp:
                raise CheckpointError(
                    f"Weights are read from their file when they are needed. Found {what}, which was written to since "
                    "the model was built from it. Build the model again, and save to another folder until it has its "
                    "values."
                )
            yield file


def stored_tensors(path: Path) -> dict[str, LazyTensor]:
    """Find the tensors of a safetensors file, without reading more than its header."""
    with _opened(path, str(path)) as file:
        stamp = _stamp(path)
        return {name: _recalled(StoredTensor(path, name, stamp), file.get_tensor(name)) for name in list(file.keys())}


def _recalled(stored: StoredTensor, mapped: torch.Tensor) -> LazyTensor:
    meta = torch.empty(mapped.shape, dtype=mapped.dtype, device="meta")
    recipe, read = Recipe(meta.nbytes, _CPU), Operation(stored, (), {}, (), None)
    read.made[0] = View(recipe, meta)
    recipe.writes.append(read)
    return make_lazy_tensor(read.made[0], _CPU)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@contextmanager
def _opened(path: Path, what: str) -> Generator[Any]:
    """Open a file for real, whatever contexts are around this one."""
    from safetensors import SafetensorError, safe_open

    try:
        with _disable_current_modes(), torch.device("cpu"), safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Weights are read from their file when they are needed. Found {what}, which cannot be read: {error}. "
            "Leave the file where it is until the model has its values; if it is damaged, copy it again."
        ) from error
