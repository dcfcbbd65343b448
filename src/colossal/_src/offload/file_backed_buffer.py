"""A tensor that is stored in a file, of which memory holds what is in use."""

import mmap
import os
from typing import final

import torch

from colossal._src.offload.scratch_file import ScratchFile


@final
class FileBackedBuffer:
    """A tensor whose values are in a file without a name, read and written as if it were in memory.

    What is read stays in the cache of the operating system as long as there is room, and is read ahead from the disk
    otherwise; what is written goes there in the background. The room on the disk is reserved at once, and free again
    when the process ends.

    Args:
        directory: The directory of the file, on a fast disk; it exists.
        numel: How many elements.
        dtype: Of which type.

    Attributes:
        tensor: The values, of one dimension; zeros at first.

    Raises:
        ConfigError: The directory is missing, may not be written to, or has too little room.

    Source: Rajbhandari et al., "ZeRO-Infinity", 2021, https://arxiv.org/abs/2104.07857, section 5.

    Example:
        >>> import tempfile, torch
        >>> from colossal._src.offload import FileBackedBuffer
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     memory = FileBackedBuffer(directory, 3, torch.float32)
        ...     _ = memory.tensor.fill_(2.0)
        ...     memory.drop_page_cache()
        ...     memory.tensor
        tensor([2., 2., 2.])
    """

    def __init__(self, directory: str | os.PathLike[str], numel: int, dtype: torch.dtype) -> None:
        num_bytes = max(numel, 1) * dtype.itemsize
        file = ScratchFile(directory, num_bytes)
        try:
            self._pages = mmap.mmap(file.buffered, num_bytes)
        finally:
            file.close()  # the mapping keeps the file
        self.tensor = torch.frombuffer(self._pages, dtype=dtype, count=max(numel, 1))[:numel]

    def drop_page_cache(self) -> None:
        """Take the values out of the memory of this process, until they are used again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)
