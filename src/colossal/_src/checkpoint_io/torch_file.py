"""Files in PyTorch's own format, read without executing pickle."""

import copy
import zipfile
from pathlib import Path
from typing import IO, Any, Self, cast, final

import torch

from colossal.errors import CheckpointError


def compact(content: dict[Any, Any]) -> dict[Any, Any]:
    """Return the content with a copy of each tensor that is part of larger memory, which would be saved with it."""
    views = {id(value): value.clone() for value in content.values() if _is_part(value)}
    if not views:
        return content
    compacted = copy.copy(content)
    compacted.update((name, views[id(value)]) for name, value in content.items() if id(value) in views)
    return compacted


def write_torch(path: Path, content: dict[Any, Any]) -> None:
    """Write `content` in PyTorch's format and make sure that it can be read without executing pickle."""
    output = _Output(path)
    try:
        with output:
            torch.save(compact(content), cast("IO[bytes]", output))
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        if output.error is not None:
            raise output.error from error
        raise CheckpointError(
            "A checkpoint can hold tensors and plain data: numbers, strings, lists and dicts of them. Found state that "
            f"could not be written and read back: {_first_line(error)}. Keep functions and objects out of the state."
        ) from error


@final
class _Output:
    """A file that remembers why it could not be written, which `torch.save` does not report."""

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._file = path.open("r+b" if path.exists() else "wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._file.truncate()  # what was reserved and not needed
        finally:
            self._file.close()

    def write(self, content: Any) -> int:
        """Write bytes."""
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Hand what was written over to the system."""
        self._file.flush()


def read_torch(path: Path, *, mmap: bool, verify: bool = True, list_name: str | None = None) -> dict[Any, Any]:
    """Read a file to the CPU, without executing pickle."""
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    try:
        if is_zip and verify:
            _verify(path)
        if path.suffix == ".safetensors":  # torch would go by this name, and the file is one of its own all the same
            with path.open("rb") as file:
                content = torch.load(file, map_location="cpu", weights_only=True)
        else:  # the format before PyTorch 1.6 is no archive, and cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"Loading needs a readable file of tensors. Found {path}, which cannot be read: {_first_line(error)}. "
            "Check that the copy is complete, and that it was saved by PyTorch or safetensors."
        ) from error
    if isinstance(content, list) and list_name is not None:
        return {list_name: content}
    if not isinstance(content, dict):
        raise CheckpointError(
            f"A file of a checkpoint must hold a dict. Found a {type(content).__name__} in {path}. "
            "Check that the path is that of a checkpoint."
        )
    return content


def _verify(path: Path) -> None:
    """Raise if an entry of the archive does not fit its checksum."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        wrong = archive.testzip()
    if wrong is None and len(set(names)) == len(names):
        return
    raise CheckpointError(
        f"Loading needs a file as it was written. Found {path} damaged: its entry {wrong or 'names'!r}, one of the "
        "tensors, does not fit its checksum. Copy it again from where it came, or load an earlier checkpoint."
    )


def _is_part(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes


def _first_line(error: Exception) -> str:
    """Return what went wrong, without torch's advice to trust the file."""
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0].partition('. Please use')[0]}"
